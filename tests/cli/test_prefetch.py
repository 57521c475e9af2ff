"""`slurm-rlhf prefetch`: downloads from a hub of the test's own, and says what to write into the file."""

from __future__ import annotations

import errno
import json
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from config_files import write

from slurm_rlhf.cli.main import main
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.user_data import data_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PARQUET = COMMIT[::-1]
REPOSITORIES = {
    "models/me/tiny": {"config.json": "{}", "tokenizer.json": "{}", "chat_template.jinja": "x", "big.gguf": "no"},
    "datasets/me/sums": {"main/train-00000-of-00001.jsonl": '{"input": "1"}', "main/test.jsonl": "{}", "README.md": ""},
    "datasets/me/plain": {"rows.jsonl": '{"input": "1"}\n'},
    "models/me/attention": {"build/torch/kernel.py": "x = 1"},
    "models/me/large": {
        **{"config.json": "{}", "model.safetensors.index.json": "{ }"},
        **{f"model-0000{n}-of-00002.safetensors": str(n) for n in (1, 2)},
    },
    "datasets/me/script": {"script.py": "", "dataset_infos.json": "{}", "rows.zip": ""},
    "datasets/me/script@parquet": {"default/train/0000.parquet": "x", "default/train/0001.parquet": "y"},
    "datasets/me/archive": {"rows.zip": ""},
}
REFUSED = {"models/me/gated": ("403", "GatedRepo"), "models/me/hidden": ("401", "RepoNotFound")}
"""Repository -> the status and the error code of an answer."""
CONVERTED = "refs%2Fconvert%2Fparquet"


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does: what a repository holds, and its files."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/"):
            name = path.removeprefix("/api/").partition("/revision/")[0].partition("/tree/")[0]
            if CONVERTED in path or PARQUET in path:
                name += "@parquet"
            if name in REFUSED:
                self._send("{}", status=REFUSED[name])
                return
            tree = [{"type": "file", "path": file, "size": 1, "oid": "e"} for file in REPOSITORIES.get(name, {})]
            about = {
                "id": name.partition("/")[2],
                "sha": PARQUET if name.endswith("@parquet") else COMMIT,
                "siblings": [{"rfilename": row["path"]} for row in tree],
            }
            there = "200" if name in REPOSITORIES else "404"
            code = "RevisionNotFound" if name.endswith("@parquet") else "RepoNotFound"
            self._send(json.dumps(tree if "/tree/" in path else about), (there, code))
            return
        name, _, rest = path.strip("/").partition("/resolve/")
        name = name if name.startswith("datasets/") else f"models/{name}"
        commit, _, file = rest.partition("/")
        files = REPOSITORIES[f"{name}@parquet" if commit == PARQUET else name]
        self._send(files[file], commit=commit)

    def _send(self, text: str, status: tuple[str, str] = ("200", ""), commit: str = COMMIT) -> None:
        self.send_response(int(status[0]))
        headers = {"ETag": f'"{zlib.crc32(text.encode())}"', "X-Repo-Commit": commit, "Content-Length": str(len(text))}
        for header, value in (headers | ({"X-Error-Code": status[1]} if status[0] != "200" else {})).items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a hub that listens."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        template = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield tmp_path / "hub"
        server.shutdown()


ALL = 'actor.model_name_or_path = "me/tiny"\ndata.prompt_dataset = "me/sums"\n'
ALL += 'ds.attn_implementation = "me/attention"\neval.dataset = "me/plain"\n'


def test_it_downloads_all_that_is_named_and_says_what_to_write(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, ALL)
    assert main(["prefetch", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    model, sums, plain = (
        cache / f"{name}/snapshots/{COMMIT}"
        for name in ("models--me--tiny", "datasets--me--sums", "datasets--me--plain")
    )
    assert sorted(path.name for path in model.iterdir()) == ["chat_template.jinja", "config.json", "tokenizer.json"]
    assert f"actor.model_name_or_path: me/tiny is in {model}" in lines
    place = lines.index("  write into the file, in [data]: one of")
    assert lines[place + 1 : place + 3] == [
        f'  prompt_dataset = "{sums}/main/test*.jsonl"',
        f'  prompt_dataset = "{sums}/main/train*.jsonl"',
    ]
    assert lines.count("eval.dataset: downloading the data set me/plain") == 1
    assert f'  dataset = "{plain}"' in lines
    assert "eval.datasets" not in "".join(lines)
    assert (cache / f"models--me--attention/snapshots/{COMMIT}/build/torch/kernel.py").exists()
    assert load_config(file).actor.model_name_or_path == str(model)  # the name is found in the cache
    assert main(["prefetch", str(file), f"--data.prompt_dataset={plain}", f"--eval.dataset={plain}"]) == 0
    assert "dataset =" not in capsys.readouterr().out
    write(tmp_path, '[[eval.datasets]]\nname = "plain"\npath = "me/plain"\n')
    assert main(["prefetch", str(file)]) == 0
    assert capsys.readouterr().out.endswith(f'  write into the file, in [eval.datasets]\n  path = "{plain}"\n')


def test_without_a_network_it_is_one_line(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, ALL)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert main(["prefetch", str(file), "--actor.model_name_or_path=", "--ds.attn_implementation=sdpa"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(
        "slurm-rlhf: error: data.prompt_dataset: me/sums: no such directory, and the Hugging Face hub"
    )
    assert "`hf download me/sums --repo-type dataset` on a login node" in err
    assert "of that name: ConnectError: [Errno 111] Connection refused. Where there is no network: " in err
    assert len(err.strip().splitlines()) == 1


def test_a_download_that_was_cut_off_goes_on(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The small files of a model come first: config.json says nothing about the weights."""
    file = write(tmp_path, 'actor.model_name_or_path = "me/large"')
    assert main(["prefetch", str(file)]) == 0
    model = cache / f"models--me--large/snapshots/{COMMIT}"
    part = model / "model-00002-of-00002.safetensors"
    part.resolve().unlink()
    assert load_config(file).actor.model_name_or_path == "me/large"
    assert main(["prefetch", str(file)]) == 0
    assert part.read_text() == "2"
    capsys.readouterr()
    assert main(["prefetch", str(file)]) == 0
    assert "nothing to download" in capsys.readouterr().out


def test_rows_in_archives_or_by_a_script_come_as_parquet(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, 'data.prompt_dataset = "me/script"')
    assert main(["prefetch", str(file)]) == 0
    place = cache / f"datasets--me--script/snapshots/{PARQUET}/default/train"
    assert capsys.readouterr().out.endswith(
        f'  write into the file, in [data]\n  prompt_dataset = "{place}/*.parquet"\n'
    )
    assert len(data_files(place / "*.parquet")) == 2
    assert main(["prefetch", str(file), "--data.prompt_dataset=me/archive"]) == 2
    assert "me/archive: it holds no rows in JSONL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("me/gated", "its owner has to let you in: accept the terms at https://huggingface.co/me/gated, then `hf auth"),
        ("me/hidden", "the Hugging Face hub has no model of that name that you may see: correct it, or `hf auth login"),
        ("me/tiny", "takes no more: [Errno 122] Disk quota exceeded. Set HF_HOME to a directory with room, for jobs"),
    ],
)
def test_a_refusal_and_a_full_disk_say_what_to_do(
    name: str,
    said: str,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    if name == "me/tiny":
        monkeypatch.setattr("huggingface_hub.file_download._chmod_and_move", full)
    assert main(["prefetch", str(write(tmp_path, f'actor.model_name_or_path = "{name}"'))]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert f"slurm-rlhf: error: actor.model_name_or_path: {name}: " in err[-1]
    assert said in err[-1]
    assert "Traceback" not in "".join(err)


def test_what_is_here_is_not_downloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert main(["prefetch", str(write(tmp_path, 'data.prompt_dataset = "a.jsonl"'))]) == 0
    assert "nothing to download" in capsys.readouterr().out
