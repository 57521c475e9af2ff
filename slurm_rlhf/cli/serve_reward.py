"""Run `slurm-rlhf serve-reward FILE.py`: a reward function behind HTTP, in workers of this machine."""

from __future__ import annotations

from pathlib import Path

from slurm_rlhf.cli.commands import Arguments


def serve(arguments: Arguments) -> int:
    """Serve until a signal ends it. Raises ConfigError, and RewardError for a file that cannot be loaded."""
    from slurm_rlhf.config.schema_jobs import Timeout
    from slurm_rlhf.errors import ConfigError, RewardError, WorkerError
    from slurm_rlhf.rewards.remote import token_of
    from slurm_rlhf.rewards.server import RewardServer
    from slurm_rlhf.workers.pool import Code, WorkerPool

    file, options = Path(arguments.one_word("Python file")).absolute(), arguments.options
    if not file.is_file():
        raise ConfigError(f"no such file: {file}: name a Python file with reward_func")
    token, limits = token_of(options.get("token", "")), Timeout()
    if options["host"] not in ("127.0.0.1", "localhost") and not token:
        raise ConfigError(f"--host={options['host']} lets others in: give a --token, as env:VARIABLE or a file")
    given = {"source": str(file), "function": "", "plugins": []}
    code = Code("slurm_rlhf.rewards.function", "served", given)
    pool = WorkerPool(code, options["workers"], options["memory_mb"], limits.connect)
    try:
        pool.ready()
        with RewardServer((options["host"], options["port"]), pool, options["timeout"], token) as server:
            host, port = server.server_address[:2]
            print(f"serving {file} on http://{host!s}:{port}", flush=True)
            server.serve_forever()
    except WorkerError as error:
        raise RewardError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"port {options['port']} of {options['host']} cannot be served: {error}") from error
    except KeyboardInterrupt:
        return 0
    finally:
        pool.close()
    return 0
