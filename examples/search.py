"""The nearest images of a query among those that `rotp-vision embed` has embedded, by faiss.

pip install faiss-cpu
rotp-vision embed --model resnet50.tv_in1k --images photos --output vectors
python examples/search.py vectors query.jpg
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import faiss
import numpy as np

import rotp_vision


def main(arguments: Sequence[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('vectors', type=Path, help='the output of rotp-vision embed')
    parser.add_argument('query', type=Path, help='an image')
    parser.add_argument('--count', type=int, default=5, help='nearest images to show')
    args = parser.parse_args(arguments)
    with (args.vectors / 'metadata.csv').open(newline='', encoding='utf-8') as file:
        names = [row['file'] for row in csv.DictReader(file) if row['row']]
    embeddings = np.load(args.vectors / 'embeddings.npy')
    index = faiss.IndexFlatIP(embeddings.shape[1])  # exact; the inner product of normalised vectors is the cosine
    index.add(embeddings)
    embedder = rotp_vision.Embedder.load(args.vectors / 'embedder')
    similarities, rows = index.search(embedder(args.query).numpy(), min(args.count, len(names)))
    for similarity, row in zip(similarities[0], rows[0], strict=True):
        print(f'{similarity:.3f}  {names[row]}')
    return [names[row] for row in rows[0]]


if __name__ == '__main__':
    main()
