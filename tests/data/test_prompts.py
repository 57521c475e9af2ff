"""Prompts: what is read of a file, and the order in which they come."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookalikes import llama_like
from random_models import saved_tokenizer, tiny_tokenizer

from slurm_rlhf.config.schema import Data
from slurm_rlhf.data.order import OrderKeys, PromptOrder
from slurm_rlhf.data.prompts import CHUNK, PromptSet
from slurm_rlhf.data.rows import read_rows
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import CheckpointError, DataError, ModelError


def write(directory: Path, *rows: Any) -> Path:
    file = directory / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_rows_become_prompts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write(tmp_path, {"input": "1+1=", "label": 2, "level": "easy"}, {"input": "ab"})
    prompts = PromptSet.load(file, tokenizer, Data(), 10)
    first, second = prompts
    assert (len(prompts), prompts.dropped, prompts[1]) == (2, 0, second)
    assert (first.index, first.text, first.label, first.row) == (
        0,
        "1+1=",
        2,
        {"input": "1+1=", "label": 2, "level": "easy"},
    )
    assert first.token_ids.dtype == "int32"
    assert first.token_ids.tolist() == tiny_tokenizer()("1+1=").input_ids
    assert (second.index, second.label, second.row) == (1, None, {"input": "ab"})


def test_too_long_is_dropped_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write(tmp_path, {"input": "12345"}, {"input": "1234"}, {"input": "123456"}, {"input": "1"})
    prompts = PromptSet.load(file, tokenizer, Data(), 4)
    assert [prompt.index for prompt in prompts] == [1, 3]
    assert prompts.dropped == 2
    with pytest.raises(DataError, match=r"all 4 prompts are longer than 0 tokens \(data.max_len"):
        PromptSet.load(file, tokenizer, Data(), 0)


def test_keys_template_and_limit(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"q": f"{i}{{}}", "a": i} for i in range(5)]
    data = Data(input_key="q", label_key="a", input_template="Q {} A {{}}")
    prompts = PromptSet.load(write(tmp_path, *rows), tokenizer, data, 100, max_samples=3)
    assert [prompt.text for prompt in prompts] == ["Q 0{} A {}", "Q 1{} A {}", "Q 2{} A {}"]
    assert [prompt.label for prompt in prompts] == [0, 1, 2]


def test_more_rows_than_a_chunk(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompts = PromptSet.load(write(tmp_path, *({"input": str(i)} for i in range(CHUNK + 3))), tokenizer, Data(), 10)
    assert [prompt.index for prompt in prompts] == list(range(CHUNK + 3))
    assert all(prompt.text == str(prompt.index) for prompt in prompts)
    assert tokenizer.decode(prompts[CHUNK + 2].token_ids.tolist()) == str(CHUNK + 2)


def test_chat_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}answer"
    chat_tokenizer = saved_tokenizer(tmp_path, template)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    file = write(tmp_path, {"input": "hi"}, {"input": turns})
    data = Data(apply_chat_template=True)
    prompts = PromptSet.load(file, chat_tokenizer, data, 100)
    assert [prompt.text for prompt in prompts] == ["user hi answer", "user a assistant b user c answer"]
    with pytest.raises(ModelError, match=r"has no chat template .*turn data.apply_chat_template off"):
        PromptSet.load(file, tokenizer, data, 100)
    with pytest.raises(DataError, match=r"rows.jsonl:2: 'input' must be a string, got list"):
        PromptSet.load(file, chat_tokenizer, Data(), 100)


def test_fingerprint_sees_rows_tokens_and_labels(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def fingerprint(*rows: Any) -> str:
        return PromptSet.load(write(tmp_path, *rows), tokenizer, Data(), 10).fingerprint()

    one, two = {"input": "1", "label": 1}, {"input": "2", "label": 2}
    base = fingerprint(one, two)
    assert base == fingerprint(one, {**two, "unused": 3})
    assert len({base, fingerprint(two, one), fingerprint(one), fingerprint(one, {**two, "label": 3})}) == 4


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"input": "a"', "not valid JSON: Expecting ',' delimiter at column 14"),
        ('["a"]', 'a JSON object is needed, got ["a"] (this looks like plain JSON'),
        ("{", "this looks like plain JSON; JSONL has one whole object on each line"),
        ("[" * 100_000, "not JSON that can be read"),
        (
            '{"prompt": "a", "label": 1}',
            "no column 'input' (columns: prompt, label): fix the row or set data.input_key",
        ),
        ("{}", "no column 'input' (columns: none)"),
        ('{"input": 3}', "'input' must be a string, got int"),
        ('{"input": ""}', "the prompt is empty"),
    ],
)
def test_bad_line(tmp_path: Path, tokenizer: Tokenizer, line: str, named: str) -> None:
    file = write(tmp_path, {"input": "a"}, "", line)
    with pytest.raises(DataError) as caught:
        PromptSet.load(file, tokenizer, Data(), 10)
    assert str(caught.value).startswith(f"{file}:3: ")
    assert named in str(caught.value)
    assert len(str(caught.value)) < 400


def test_bad_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "rows.jsonl"
    with pytest.raises(DataError, match="no such file: "):
        PromptSet.load(file, tokenizer, Data(), 10)
    file.write_text("\n\n")
    with pytest.raises(DataError, match="the file holds no prompts"):
        PromptSet.load(file, tokenizer, Data(), 10)
    file.write_bytes(b'{"input": "a"}\n{"input": "\xff"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: not UTF-8 text \(byte 11 of the line\)"):
        PromptSet.load(file, tokenizer, Data(), 10)


def test_windows_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes('\ufeff{"input": "ü"}\r\n\r\n{"input": "b"}'.encode())
    assert list(read_rows(file)) == [(f"{file}:1", {"input": "ü"}), (f"{file}:3", {"input": "b"})]
    assert list(read_rows(file, 1)) == [(f"{file}:1", {"input": "ü"})]


def test_one_message_without_a_role_makes_it_no_chat(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(llama_like(tmp_path, template="{{ messages[0].content }}"))
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"input": [{"role": "user", "content": "1+1"}, {"text": "2"}]}) + "\n")
    with pytest.raises(DataError, match="must be a string or a list of messages with role and content, got list"):
        PromptSet.load(file, tokenizer, Data(apply_chat_template=True), 100)


# --- order ------------------------------------------------------------------------------------------------------------


def rest(order: PromptOrder) -> list[list[int]]:
    batches = []
    while (batch := order.next()) is not None:
        batches.append(batch)
    return batches


SIZES = st.integers(1, 40).flatmap(lambda prompts: st.tuples(st.just(prompts), st.integers(1, prompts)))


@given(SIZES, st.integers(1, 3), st.integers(0, 2**32 - 1), st.data())
def test_every_episode_is_a_permutation_and_resumes_anywhere(
    sizes: tuple[int, int], episodes: int, seed: int, data: st.DataObject
) -> None:
    prompts, batch_size = sizes
    order = PromptOrder(prompts, batch_size, episodes, seed, shuffle=data.draw(st.booleans()))
    whole = rest(order)
    assert len(whole) == order.total == prompts // batch_size * episodes
    for episode in range(episodes):
        batches = whole[episode * order.batches_per_episode : (episode + 1) * order.batches_per_episode]
        seen = [position for batch in batches for position in batch]
        assert len(set(seen)) == len(seen) == prompts // batch_size * batch_size
        assert set(seen) <= set(range(prompts))

    stop = data.draw(st.integers(0, len(whole)))
    first, second = replace(order), replace(order)
    for _ in range(stop):
        first.next()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.episode_of(second.place) == stop // order.batches_per_episode
    assert rest(second) == whole[stop:]


def test_shuffle_depends_on_seed_and_episode() -> None:
    def episodes(seed: int) -> list[list[int]]:
        return rest(PromptOrder(50, 50, 2, seed))

    first, second = episodes(1)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    assert episodes(1) == [first, second]
    assert episodes(2)[0] != first
    assert rest(PromptOrder(5, 2, 2, 1, shuffle=False)) == [[0, 1], [2, 3], [0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("name", "value", "stated"),
    [
        ("prompts", 9, "the number of usable prompts in {} is 9 and was 10 when"),
        ("batch_size", 3, "{} is 3 and was 2 when"),
        ("seed", 2, "train.seed is 2 and was 1 when"),
        ("shuffle", False, "data.shuffle is False and was True when"),
        ("fingerprint", "y", "the rows of {}, or their tokens (data.input_key,"),
    ],
)
@pytest.mark.parametrize("keys", [OrderKeys(), OrderKeys("sft.dataset", "sft.batch_size", "sft.output_dir")])
def test_other_data_does_not_resume(name: str, value: object, stated: str, keys: OrderKeys) -> None:
    order = PromptOrder(10, 2, 1, seed=1, fingerprint="x", keys=keys)
    order.next()
    with pytest.raises(CheckpointError) as caught:
        replace(order, **{name: value}).load_state_dict(order.state_dict())
    assert str(caught.value).startswith(stated.format(keys.batch_size if name == "batch_size" else keys.dataset))
    assert f"restore it, or start a new run in another --{keys.directory}" in str(caught.value)
    replace(order, episodes=5).check(order.state_dict())


def test_prompts_must_fill_a_batch() -> None:
    with pytest.raises(DataError, match=r"holds 4 usable prompts, fewer than rollout\.batch_size = 5: lower it"):
        PromptOrder(4, 5, 1, seed=1)


@given(SIZES, st.data())
def test_places_that_are_given_back_come_first_and_none_is_lost(sizes: tuple[int, int], data: st.DataObject) -> None:
    prompts, batch_size = sizes
    order = PromptOrder(prompts, batch_size, 2, 7)
    end, used = order.total * batch_size, []
    while order.left:
        taken = order.take(data.draw(st.integers(1, 2 * batch_size)))
        kept = data.draw(st.integers(1, len(taken)))
        back = Random(data.draw(st.integers(0, 2**32 - 1))).sample(taken, len(taken) - kept)
        resumed = replace(order)
        resumed.load_state_dict(json.loads(json.dumps(order.state_dict(back))))
        order.give_back(back)
        assert (resumed.place, resumed.again) == (order.place, order.again)
        used += [place for place in taken if place not in back]
        assert order.left == end - len(used)
    assert sorted(used) == list(range(end))
    assert order.take(1) == []
    assert order.next() is None
    order.rewind()
    assert (order.left, order.again) == (end, [])


def test_a_place_is_the_prompt_that_whole_batches_have_there() -> None:
    order = PromptOrder(11, 3, 2, 5)
    whole = rest(replace(order))
    assert [[order.position(3 * batch + at) for at in range(3)] for batch in range(order.total)] == whole
    assert [order.episode_of(place) for place in (0, 8, 9, 17)] == [0, 0, 1, 1]


def test_states_say_no_more_than_those_of_whole_batches_where_that_is_all() -> None:
    order = PromptOrder(10, 2, 1, 1)
    assert order.take(4) == [0, 1, 2, 3]
    plain = order.state_dict()
    assert (plain["taken"], "place" in plain, "again" in plain) == (2, False, False)
    assert order.state_dict([2, 3]) == plain | {"taken": 1}  # nothing between them and the next: they are the next
    assert order.state_dict([1, 2]) == plain | {"taken": 1, "place": 4, "again": [1, 2]}
    order.load_state_dict(order.state_dict([1, 2]))
    assert order.take(3) == [1, 2, 4]
    order.load_state_dict(plain)  # as an earlier version wrote it
    assert order.take(1) == [4]
