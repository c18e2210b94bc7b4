"""Publishing and loading, with a stand-in of the Hugging Face Hub on this machine."""

import base64
import hashlib
import json
import os
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import huggingface_hub
import pytest
import timm
import torch
import yaml

from rotp_vision import convert, load_pretrained, push_to_hub

COMMIT = 'c' * 40


class StandIn(BaseHTTPRequestHandler):
    repositories: dict[str, dict[str, bytes]]

    def log_message(self, *args):
        pass

    def answer(self, status=200, body=b'', **headers):
        self.send_response(status)
        for name, value in {'Content-Length': len(body), **headers}.items():
            self.send_header(name.replace('_', '-'), str(value))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)

    def answer_json(self, value):
        self.answer(body=json.dumps(value).encode(), Content_Type='application/json')

    @property
    def address(self):
        return f'http://127.0.0.1:{self.server.server_port}'

    def do_POST(self):
        body = self.rfile.read(int(self.headers['Content-Length']))
        if self.path == '/api/repos/create':
            asked = json.loads(body)
            name = '/'.join(filter(None, (asked.get('organization'), asked['name'])))
            self.repositories.setdefault(name, {})
            self.answer_json({'url': f'{self.address}/{name}'})
        elif self.path == '/api/validate-yaml':  # the front matter of the model card
            yaml.safe_load(json.loads(body)['content'].split('---')[1])
            self.answer_json({'warnings': [], 'errors': []})
        elif match := re.match('/api/models/(.+)/preupload/main', self.path):
            paths = [file['path'] for file in json.loads(body)['files']]
            self.answer_json({'files': [{'path': p, 'uploadMode': 'regular', 'shouldIgnore': False} for p in paths]})
        elif match := re.match('/api/models/(.+)/commit/main', self.path):
            for line in map(json.loads, body.splitlines()):
                if line['key'] == 'file':
                    content = base64.b64decode(line['value']['content'])
                    self.repositories[match[1]][line['value']['path']] = content
            url = f'{self.address}/{match[1]}/commit/{COMMIT}'
            self.answer_json({'success': True, 'commitOid': COMMIT, 'commitUrl': url})
        else:
            self.answer(404)

    def do_GET(self):
        if match := re.match('/api/models/([^/]+/[^/]+)/tree/', self.path):
            files = self.repositories[match[1]].items()
            self.answer_json([{'type': 'file', 'path': name, 'size': len(b), 'oid': 'o' * 40} for name, b in files])
        elif match := re.match('/api/models/([^/]+/[^/]+)', self.path):
            names = [{'rfilename': name} for name in self.repositories[match[1]]]
            self.answer_json({'id': match[1], 'sha': COMMIT, 'siblings': names})
        elif match := re.match('/([^/]+/[^/]+)/resolve/[^/]+/(.+)', self.path):
            content = self.repositories.get(match[1], {}).get(match[2])
            if content is None:
                self.answer(404, X_Error_Code='EntryNotFound')
            else:
                self.answer(body=content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=COMMIT)
        else:
            self.answer(404)

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The files by name of each repository of a hub to which everything is sent that would go to huggingface.co."""
    repositories = {}
    server = ThreadingHTTPServer(('127.0.0.1', 0), type('Handler', (StandIn,), {'repositories': repositories}))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f'http://127.0.0.1:{server.server_port}'
    url = address + '/{repo_id}/resolve/{revision}/{filename}'
    monkeypatch.setattr(huggingface_hub.constants, 'ENDPOINT', address)
    monkeypatch.setattr(huggingface_hub.constants, 'HUGGINGFACE_CO_URL_TEMPLATE', url)
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
    for name in list(os.environ):
        if name.lower().endswith('_proxy'):
            monkeypatch.delenv(name)
    huggingface_hub.close_session()
    yield repositories
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def model():
    model = convert(timm.create_model('test_efficientnet', num_classes=5), {'prior': 'norm'}).eval()
    model.global_pool.set_weights(smoothness=3.0, norm_power=1.5)
    return model


x = torch.randn(2, 3, 64, 64)


def test_a_published_model_is_loaded_by_timm_and_by_us(hub, model):
    where = push_to_hub(model, 'me/model', metrics={'top-1 %': 76.1}, license='mit', token='hf_x')
    assert where.startswith('http://127.0.0.1:')
    assert sorted(set(hub['me/model']) - {'.gitattributes'}) == ['README.md', 'config.json', 'model.safetensors']
    card = hub['me/model']['README.md'].decode()
    assert "rotp_vision.load_pretrained('hf-hub:me/model')" in card
    assert "timm.create_model('hf-hub:me/model', pretrained=True)" in card
    for loaded in (
        load_pretrained('hf-hub:me/model'),
        load_pretrained('hf-hub:me/model@main'),
        timm.create_model('hf-hub:me/model', pretrained=True).eval(),
    ):
        assert torch.equal(loaded(x), model(x))


def test_what_timm_publishes_is_loaded_again(hub, model):
    timm.models.push_to_hf_hub(model, 'me/timm', token='hf_x', safe_serialization=True)
    assert torch.equal(timm.create_model('hf-hub:me/timm', pretrained=True).eval()(x), model(x))
