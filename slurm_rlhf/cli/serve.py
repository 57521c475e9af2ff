"""Run `slurm-rlhf serve-reward` and `serve-env`: rewards and environments behind HTTP, in workers of this machine."""

from __future__ import annotations

from pathlib import Path

from slurm_rlhf.cli.commands import Arguments
from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.errors import ConfigError, RewardError, WorkerError
from slurm_rlhf.user_files import file_and_name
from slurm_rlhf.workers.http import WorkServer, token_of
from slurm_rlhf.workers.pool import RAISED, Code, WorkerPool


def serve_reward(arguments: Arguments) -> int:
    """Serve a reward function or a reward model, until a signal ends it. Raises as `_serve`."""
    from slurm_rlhf.rewards.pooled import ModelServer, RewardServer

    path = _named(arguments, "Python file, or directory of a reward model", "with reward_func, or a model's directory")
    if path.is_dir():
        code = Code("slurm_rlhf.ranks.model_workers", "ServedModel", {"path": str(path)})
        return _serve(arguments, path, code, ModelServer, 1)
    given = {"source": str(path), "function": "", "plugins": []}
    return _serve(arguments, path, Code("slurm_rlhf.rewards.function", "served", given), RewardServer, 4)


def serve_environments(arguments: Arguments) -> int:
    """Serve the environments of a file, until a signal ends it. Raises as `_serve`."""
    from slurm_rlhf.environments.host import EnvironmentServer, code_of

    path = _named(arguments, "Python file", "with environments (slurm-rlhf docs environments)")
    return _serve(arguments, path, code_of(str(path), arguments.passed), EnvironmentServer, 4, "describe")


def _named(arguments: Arguments, word: str, what: str) -> Path:
    path = Path(arguments.one_word(word)).absolute()
    if not (file := Path(file_and_name(str(path))[0])).exists():
        raise ConfigError(f"no such file: {file}: name a Python file {what}")
    return path


def _serve(arguments: Arguments, path: Path, code: Code, made: type[WorkServer], workers: int, first: str = "") -> int:
    """Serve calls of `code`, once a call of `first` has worked; `workers`: their number, unless an option gives one.

    Raises ConfigError, and RewardError for what cannot be loaded.
    """
    options, limits = arguments.options, Timeout()
    token = token_of(options.get("token", ""), "--token")
    if options["host"] not in ("127.0.0.1", "localhost") and not token:
        raise ConfigError(f"--host={options['host']} lets others in: give a --token, as env:VARIABLE or a file")
    pool = WorkerPool(code, options.get("workers", workers), options["memory_mb"], limits.connect, serves=True)
    try:
        pool.ready()
        if first:
            pool.submit(first, timeout_s=limits.connect).result()
        with made((options["host"], options["port"]), pool, options["timeout"], path.name, token) as server:
            host, port = server.server_address[:2]
            print(f"serving {path} on http://{host!s}:{port}", flush=True)
            server.serve_forever()
    except WorkerError as error:
        raise RewardError(str(error) if error.kind == RAISED else f"{path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"port {options['port']} of {options['host']} cannot be served: {error}") from error
    except KeyboardInterrupt:
        return 0
    finally:
        pool.close()
    return 0
