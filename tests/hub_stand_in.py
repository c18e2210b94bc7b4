"""A stand-in of the Hugging Face Hub on this machine: what pushing and loading a model need of it."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import yaml

COMMIT = 'c' * 40


class Handler(BaseHTTPRequestHandler):
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


@contextmanager
def stand_in() -> Iterator[tuple[str, dict[str, dict[str, bytes]]]]:
    """The address of a running stand-in, and its repositories: their files by name."""
    repositories: dict[str, dict[str, bytes]] = {}
    server = ThreadingHTTPServer(('127.0.0.1', 0), type('Handler', (Handler,), {'repositories': repositories}))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f'http://127.0.0.1:{server.server_port}', repositories
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
