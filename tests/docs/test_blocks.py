"""The shell blocks of the documentation run as they are printed."""

import socket
from pathlib import Path

import pytest

from tests.docs.blocks import Block, BlockError, marked_blocks, run_page, with_ports
from tests.docs.markdown import pages

NEEDS_VLLM = "with-vllm.md"
"""tests/vllm/test_page.py runs it."""
MARKED = [
    page
    for page in pages()
    if page.name != NEEDS_VLLM and marked_blocks(page.read_text(encoding="utf-8"))
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", MARKED, ids=[page.name for page in MARKED])
def test_marked_blocks_run(page: Path, tmp_path: Path) -> None:
    (directory := tmp_path / "page").mkdir()
    run_page(page, directory)


def write_page(tmp_path: Path, *parts: str) -> tuple[Path, Path]:
    (directory := tmp_path / "page").mkdir()
    (page := tmp_path / "page.md").write_text("\n".join(parts), encoding="utf-8")
    return page, directory


def test_blocks_of_a_page_share_one_shell(tmp_path: Path) -> None:
    first = "<!-- run -->\n```sh\nNAME=one; mkdir folder; cd folder\n```\n"
    unmarked = "```sh\nfalse\n```\n"
    second = '1. A list:\n\n   <!-- run -->\n   ```bash\n   echo "$NAME" > file\n   ```\n'
    page, directory = write_page(tmp_path, first, unmarked, second)
    assert run_page(page, directory) == 2
    assert (directory / "folder/file").read_text() == "one\n"


def test_failed_block_is_named_with_its_output(tmp_path: Path) -> None:
    passes, fails = "<!-- run -->\n```sh\ntrue\n```\n", "<!-- run -->\n```sh\nls /no/such\n```\n"
    page, directory = write_page(tmp_path, passes, fails, passes)
    with pytest.raises(BlockError, match=r"page.md, line 8: the block ended with status 2") as it:
        run_page(page, directory)
    assert "ls /no/such" in str(it.value)
    assert "No such file" in str(it.value)


def test_block_that_takes_too_long_fails(tmp_path: Path) -> None:
    page, directory = write_page(tmp_path, "<!-- run -->\n```sh\nsleep 100\n```\n")
    with pytest.raises(BlockError, match="took too long"):
        run_page(page, directory, timeout_s=0.2)


def test_server_in_its_own_terminal_is_stopped_at_the_end(tmp_path: Path) -> None:
    hidden = "<!-- run until ready\necho $$ > pid; echo ready; exec sleep 1000\n-->\n"
    visible = "<!-- run -->\n```sh\nkill -0 $(cat pid)\n```\n"
    page, directory = write_page(tmp_path, hidden, visible)
    assert run_page(page, directory) == 2
    assert not Path("/proc", (directory / "pid").read_text().strip()).exists()


def test_server_that_ends_before_it_is_ready_fails(tmp_path: Path) -> None:
    page, directory = write_page(tmp_path, "<!-- run until ready -->\n```sh\necho no\n```\n")
    with pytest.raises(BlockError, match="ended with status 0 before it printed 'ready'"):
        run_page(page, directory)


def test_mark_without_a_shell_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 1"):
        marked_blocks("<!-- run -->\nText.\n")


def test_taken_port_is_replaced_in_commands_and_in_the_awaited_text() -> None:
    block = Block(1, "serve --port 8100 127.0.0.1:8100 10.0.81.00 x8100", "8100")
    expected = Block(1, "serve --port 7 127.0.0.1:7 10.0.81.00 x8100", "7")
    assert with_ports(block, {"8100": "7"}) == expected


def test_page_uses_another_port_if_its_own_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        page, directory = write_page(tmp_path, f"<!-- run -->\n```sh\necho {port} > port\n```\n")
        run_page(page, directory)
    assert int((directory / "port").read_text()) != port
