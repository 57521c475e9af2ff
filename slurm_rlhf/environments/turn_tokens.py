"""Makes the tokens of an episode: its prompt, and what stands between two turns that the policy has sampled.

Sampled tokens are never encoded again. The next prompt is the one before, the sampled tokens, and the tokens of a
suffix: what the chat template puts after an answer when messages follow, which is the difference of two renderings of
a conversation made up for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_rlhf.data.tokenizer import ANSWER, Tokenizer, encode_prompts, ids_behind
from slurm_rlhf.environments.records import Messages, ToolCall
from slurm_rlhf.environments.tool_calls import PROBE, PROBE_SCHEMA, Schemas, ToolReader, answers, without_end
from slurm_rlhf.errors import ModelError

THOUGHT = "<think>\nslurm-rlhf-thought\n</think>\n\n"
QUESTION = {"role": "user", "content": "?"}


class TurnTokens:
    """Makes the tokens between turns with one model's tokenizer, and its chat template where `templated`."""

    def __init__(self, tokenizer: Tokenizer, templated: bool, reader: ToolReader | None = None) -> None:
        """Check the chat template; `reader` reads calls of tools, None: the environments have none.

        Raises ModelError for a template that changes earlier messages, or strips their thinking, when others follow.
        """
        self.tokenizer, self.templated, self.reader = tokenizer, templated, reader
        if not templated:
            return
        answer = tokenizer.chat([QUESTION, {"role": "assistant", "content": THOUGHT + ANSWER}], answer=False)
        _, there, self._end = answer.rpartition(ANSWER)
        if not there or (reader is None and THOUGHT.strip() not in answer):
            raise self._changes()
        if reader is None:
            self.suffix([QUESTION])
        elif ANSWER not in self.suffix(
            [{"role": "tool", "name": PROBE.name, "content": ANSWER}], [PROBE], [PROBE_SCHEMA]
        ):
            raise ModelError(
                f"the chat template of {tokenizer.directory} does not show the model what tools answer: use a model "
                "whose template does, or an environment with step(messages)"
            )

    def prompt(self, messages: Messages, tools: Schemas = (), where: str = "") -> list[int]:
        """Encode the prompt of an episode. Raises ModelError."""
        text = self.tokenizer.chat(messages, where, tools=tools) if self.templated else str(messages[-1]["content"])
        return encode_prompts([text], self.tokenizer, self.templated)[0]

    def behind(
        self, before: Sequence[int], messages: Messages, calls: Sequence[ToolCall] = (), tools: Schemas = ()
    ) -> list[int]:
        """Encode `messages` after the tokens so far, whose last are a sampled turn, up to where the next turn starts.

        `calls`: the calls in that turn, which the messages answer; `tools`: what the prompt was made with.
        """
        if not self.templated:
            return self.text_behind(before, str(messages[-1]["content"]))
        ids = self.text_behind(before, self.suffix(messages, calls, tools))
        # The template ends the answer with a token that the policy has sampled, unless it was cut off.
        return ids[1:] if ids[:1] == list(before[-1:]) else ids

    def text_behind(self, before: Sequence[int], text: str) -> list[int]:
        """Encode a text as it is after the tokens so far."""
        return ids_behind(list(before), text, self.tokenizer)

    def suffix(self, messages: Messages, calls: Sequence[ToolCall] = (), tools: Schemas = ()) -> str:
        """Return what the chat template puts after an answer: its end, the messages, and the next turn's start.

        Raises ModelError where it changes what stands before.
        """
        answer = {"role": "assistant", "content": THOUGHT + ANSWER}
        if calls and self.reader:
            answer = self.reader.message(answer["content"], calls)
        one = self.tokenizer.chat([QUESTION, answer], tools=tools, answer=False)
        more = self.tokenizer.chat([QUESTION, answer, *(answers(messages) if calls else messages)], tools=tools)
        if calls and not one.endswith(self._end):
            kept = without_end(one, self.tokenizer)
        else:
            kept = one.removesuffix(self._end)
        if not more.startswith(kept) or (calls and kept == one):
            raise self._changes()
        return more[len(kept) :]

    def _changes(self) -> ModelError:
        return ModelError(
            f"the chat template of {self.tokenizer.directory} changes earlier messages when others follow (it strips "
            "the thinking of earlier turns, say), so that an episode of several turns cannot keep the tokens that were "
            "sampled: use a model whose template does not, or a copy of its directory with a chat_template.jinja that "
            "writes every message as if it were the last"
        )
