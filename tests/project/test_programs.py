"""What is kept of compiled programs between runs of the tests."""

import zlib
from pathlib import Path

import jax

from tests import programs

WHOLE = zlib.compress(bytes(range(200)))


def test_what_is_whole_is_kept_and_what_is_never_read_is_not(tmp_path):
    folder = programs.kept(tmp_path)
    key = "0" * 64
    (folder / f"jit_f-{key}-cache").write_bytes(WHOLE)
    (folder / f"jit_g-{key}-cache").write_bytes(WHOLE[:-1])
    (folder / f"jit_on_slice_{'0' * 16}-{key}-cache").write_bytes(WHOLE)
    assert programs.kept(tmp_path) == folder
    assert [x.name for x in folder.glob("*-cache")] == [f"jit_f-{key}-cache"]


def test_too_much_is_dropped(tmp_path):
    (programs.kept(tmp_path) / "jit_f-cache").write_bytes(WHOLE)
    assert list(programs.kept(tmp_path, len(WHOLE)).glob("*-cache"))
    assert not list(programs.kept(tmp_path, len(WHOLE) - 1).glob("*-cache"))


def test_jax_keeps_its_programs_as_is_expected():
    """The names and the compression, on which the first test relies."""
    folder = jax.config.jax_compilation_cache_dir
    jax.jit(lambda x: x * 17 + 4)(1.0).block_until_ready()
    paths = list(Path(folder).glob("jit__lambda-*-cache"))
    assert any(len(x.name) == len(f"jit__lambda-{'0' * 64}-cache") for x in paths)
    assert any(zlib.decompress(x.read_bytes()) for x in paths)
