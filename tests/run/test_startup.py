"""What the start of a run tells its engines and its user."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import ParameterSpec
from slurm_rlhf.run.startup import Startup
from slurm_rlhf.wire.calls import StartAnswer
from slurm_rlhf.wire.handles import EngineHandle


def answered(*answers: StartAnswer) -> SimpleNamespace:
    futures: list[Future[StartAnswer]] = []
    for answer in answers:
        futures.append(Future())
        futures[-1].set_result(answer)
    return SimpleNamespace(start_all=lambda call, request: futures)


def test_engines_learn_what_the_first_rank_of_the_actor_is_going_to_send() -> None:
    sent = [cast(ParameterSpec, "embeddings"), cast(ParameterSpec, "head")]
    roles = {
        "actor": answered(StartAnswer("read", sent), StartAnswer()),
        "critic": answered(StartAnswer("with a new head")),
        "rollout": EngineHandle(cast(Any, None), "rollout", 2, 1, Config().timeout),
    }
    notes: list[str] = []
    told: list[Any] = []

    def wait(parameters: list[ParameterSpec]) -> list[int]:
        told.append(parameters)
        return [1]

    startup: Any = SimpleNamespace(
        run=SimpleNamespace(config=Config(), reporting=SimpleNamespace(note=notes.append)),
        supervisor=SimpleNamespace(roles=roles),
        inputs=SimpleNamespace(total_steps=3),
        _tell_when_ready=lambda role, futures: None,
    )
    Startup._start_trainers(startup, cast(Any, SimpleNamespace(wait=wait)))
    assert told == [sent]
    assert notes[-3:] == ["read", "with a new head", "1 of 2 engines are ready; the others join when they are"]
