"""`slurm-rlhf prefetch`: downloads from a hub of the test's own, and says what to write into the file."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from slurm_rlhf.cli.main import main
from slurm_rlhf.config.load import load_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORIES = {
    "models/me/tiny": {"config.json": "{}", "tokenizer.json": "{}", "chat_template.jinja": "x", "big.gguf": "no"},
    "datasets/me/sums": {"main/train-00000-of-00001.jsonl": '{"input": "1"}', "main/test.jsonl": "{}", "README.md": ""},
    "datasets/me/plain": {"rows.jsonl": '{"input": "1"}\n'},
    "models/me/attention": {"build/torch/kernel.py": "x = 1"},
}


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does: what a repository holds, and its files."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/"):
            name = path.removeprefix("/api/").partition("/revision/")[0].partition("/tree/")[0]
            tree = [{"type": "file", "path": file, "size": 1, "oid": "e"} for file in REPOSITORIES.get(name, {})]
            about = {
                "id": name.partition("/")[2],
                "sha": COMMIT,
                "siblings": [{"rfilename": row["path"]} for row in tree],
            }
            self._send(json.dumps(tree if "/tree/" in path else about), name in REPOSITORIES)
            return
        name, _, rest = path.strip("/").partition("/resolve/")
        name = name if name.startswith("datasets/") else f"models/{name}"
        file = rest.partition("/")[2]
        self._send(REPOSITORIES[name][file], file in REPOSITORIES[name])

    def _send(self, text: str, there: bool = True) -> None:
        self.send_response(200 if there else 404)
        for header, value in {"ETag": '"e"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(text))}.items():
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


def written(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(
        '[actor]\nmodel_name_or_path = "me/tiny"\n[data]\nprompt_dataset = "me/sums"\n[ds]\n'
        'attn_implementation = "me/attention"\n[eval]\ndataset = "me/plain"\n'
    )
    return file


def test_it_downloads_all_that_is_named_and_says_what_to_write(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path)
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
    file.write_text('[[eval.datasets]]\nname = "plain"\npath = "me/plain"\n')
    assert main(["prefetch", str(file)]) == 0
    assert capsys.readouterr().out.endswith(f'  write into the file, in [eval.datasets]\n  path = "{plain}"\n')


def test_without_a_network_it_is_one_line(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert main(["prefetch", str(file), "--actor.model_name_or_path=", "--ds.attn_implementation=sdpa"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(
        "slurm-rlhf: error: data.prompt_dataset: me/sums: no such directory, and the Hugging Face hub"
    )
    assert "`hf download me/sums --repo-type dataset` on a login node" in err
    assert "of that name: ConnectError: [Errno 111] Connection refused. Where there is no network: " in err
    assert len(err.strip().splitlines()) == 1


def test_what_is_here_is_not_downloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    file = tmp_path / "run.toml"
    file.write_text('[data]\nprompt_dataset = "a.jsonl"\n')
    assert main(["prefetch", str(file)]) == 0
    assert "nothing to download" in capsys.readouterr().out
