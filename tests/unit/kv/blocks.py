"""Blocks of tests: keys and bytes that follow from a number."""

import hashlib
import random

from rollout_engine.kv.block_directory import BlockDirectory
from rollout_engine.kv.block_listing import list_blocks
from rollout_engine.kv.connector import KVLayout

LAYOUT = KVLayout(model="tiny, 2 layers", dtype="bfloat16", block_size=16, block_bytes=4096, made_with="cpu", pool="a")
NAMESPACE = LAYOUT.namespace


def key(number):
    return hashlib.blake2b(str(number).encode(), digest_size=32).digest()


def data(number, size=4096):
    return memoryview(random.Random(number).randbytes(size))


def open_blocks(path, max_bytes=1 << 20, namespace=NAMESPACE, is_mapped=False):
    return BlockDirectory(path, namespace, max_bytes, is_mapped=is_mapped)


def file_of(path, number, namespace=NAMESPACE):
    name = key(number).hex()
    return path / namespace / name[:2] / name[2:]


def real_bytes(blocks):
    """Bytes of all files while no process changes any, and those that the account states: no limit if it is torn."""
    with blocks._account.hold() as account:
        found = sum(file.num_bytes for file in list_blocks(blocks._root))
        return found, account.num_bytes if account.is_known else float("inf")
