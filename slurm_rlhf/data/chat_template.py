"""Render chat templates as transformers does, in a process whose time and memory are limited.

A template is a program that comes with a model. It runs in Jinja's immutable sandbox, with the settings, filters and
functions that templates on the Hugging Face hub rely on (transformers, `utils/chat_template_utils.py`); the sandbox
lets it loop without end and fill the memory. `python -m slurm_rlhf.data.chat_template` is the process: it reads and
writes a line of JSON for each prompt.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from slurm_rlhf.errors import ModelError, cut

SECONDS = 10.0
"""Computing time for a prompt, thousands of times what templates take; waiting does not count."""
MIB = 512
"""Address space of the process, of which Python takes a tenth."""


class ChatTemplate:
    """Render messages with one template; `special` maps names such as bos_token, which templates use, to tokens."""

    def __init__(self, source: str, special: dict[str, str], file: str) -> None:
        """`file`: where the template stands."""
        self.source = source
        self.special = special
        self.file = file
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        where: str,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """Return the messages as text; with `add_generation_prompt` the header of the next answer ends it.

        `tools`: the schemas of those that the model may call.

        Raises ModelError, naming `where`, when the template does not compile, refuses the messages, or takes more time
        or memory than a template may.
        """
        values = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) or None,
        }
        answer = self._ask(values)
        if "text" in answer:
            return str(answer["text"])
        roles = ", ".join(str(message.get("role")) for message in messages)
        if "error" in answer:
            raise ModelError(
                f"{where}: the chat template in {self.file} failed on messages with roles {roles}: {answer['error']}"
            )
        raise ModelError(
            f"{where}: the chat template in {self.file} took more than {answer['limit']}, which no template needs, on "
            f"messages with roles {roles} that begin {cut(str(messages[0].get('content')), 60)!r}: look for a loop in "
            "the template that does not end or grows with the messages, or take the prompt out"
        )

    def _ask(self, values: dict[str, Any]) -> dict[str, Any]:
        """Let the process render; start it where there is none."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(values).encode() + b"\n")
            process.stdin.flush()
        if line := process.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            return found
        self._process = None
        code = process.wait()
        if code == -signal.SIGPROF:
            return {"limit": f"{SECONDS:g} s of computing time"}
        return {"limit": f"{MIB} MiB of memory (its process ended with status {code})"}

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        head = {"source": self.source, "special": self.special, "seconds": SECONDS, "mib": MIB}
        process.stdin.write(json.dumps(head).encode() + b"\n")
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Accept `{% generation %}`, which marks the assistant's words for training and renders its contents."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # Jinja's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
    return environment


def main() -> None:
    """Render what comes as lines, until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the process that reads the answers takes them
    head, template = json.loads(sys.stdin.buffer.readline()), None
    environment, (_, hard) = _environment(), resource.getrlimit(resource.RLIMIT_AS)
    size = head["mib"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, head["seconds"])  # SIGPROF ends this process
        try:
            if template is None:
                template = environment.from_string(head["source"])
            # None, because templates test `is not none`, which is true for undefined names.
            values = {"documents": None, **json.loads(line)}
            answer = json.dumps({"text": template.render(**head["special"], **values)})
        except MemoryError:
            answer = json.dumps({"limit": f"{head['mib']} MiB of memory"})
        except Exception as error:
            kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
            answer = json.dumps({"error": f"{kind}{error}"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
