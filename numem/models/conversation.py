"""Conversations that append to a token history instead of encoding it again.

history   [ prompt 1 | reply 1 ][ rest of the turn, prompt 2 | reply 2 ][ ...     token ids, never encoded twice
text      <user>..<assistant>\\n   \\n\\nYes<end>  \\n<user>..

Encoding a text that was decoded may give other ids, where a reply begins or ends within what the tokenizer would make
one token of; then nothing computed before could be used again.
"""

import uuid
from os.path import commonprefix
from typing import TYPE_CHECKING, Self

from numem.errors import ContextLengthError, ModelError
from numem.models.text.tokenizer import Tokenizer
from numem.runtime.continuation import Continuation
from numem.runtime.request import Finish, Request
from numem.runtime.sampling import GREEDY, Sampler

if TYPE_CHECKING:
    from numem.models.lm import LM
    from numem.runtime.front import Runtime


class Conversation:
    """A chat of several turns; each computes only what it adds.

    `messages` may be edited between turns: what the history and the new text have in common is kept, up to the last
    token boundary before they part.

    Args:
        lm: the model, which has a chat template.
        runtime: serves the turns, together with other requests; without one, the conversation holds pages of the
            model's own session until it is closed.
        system: text of a first system message, empty for none.

    Attributes:
        messages: {"role", "content"} of all turns.
        tokens: the history, prompts and replies as they were evaluated.
    """

    def __init__(
        self,
        lm: "LM",
        runtime: "Runtime | None" = None,
        *,
        system: str = "",
        max_new_tokens: int = 256,
        sampler: Sampler = GREEDY,
    ) -> None:
        self.lm = lm
        self.runtime = runtime
        self.max_new_tokens = max_new_tokens
        self.sampler = sampler
        self.messages = [{"role": "system", "content": system}] if system else []
        self.tokens: list[int] = []
        self._told: list[dict[str, str]] = []
        self._continuation: Continuation | None = None

    def say(self, text: str) -> str:
        """The reply to a message; after an error the conversation is as before.

        Raises:
            InputError: the model has no chat template, or it refuses the messages.
            ContextLengthError, CapacityError: the history and the reply do not fit.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._prompt(messages)
        if len(prompt) + self.max_new_tokens - 1 > self.lm.max_position:
            raise ContextLengthError(
                f"conversation: {len(prompt)} tokens and a reply of {self.max_new_tokens} exceed max_position "
                f"{self.lm.max_position}; drop messages, or ask for a shorter reply"
            )
        reply = self._generate(prompt) if self.runtime is None else self._request(self.runtime, prompt)
        spoken = reply[:-1] if reply and reply[-1] in self.lm.tokenizer.eos_ids else reply
        answer = self.lm.tokenizer.decode(spoken)
        self.tokens = prompt + reply
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self._told = [dict(message) for message in self.messages]
        return answer

    def close(self) -> None:
        """Give the pages back; the conversation may go on, and is computed anew then."""
        if self._continuation is not None:
            self._continuation.close()
            self._continuation = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer = self.lm.tokenizer
        if self.tokens and messages[:-1] == self._told:
            prompt = _continued(tokenizer, self.tokens, messages)
        else:
            prompt = _edited(tokenizer, self.tokens, tokenizer.render(messages))
        return tokenizer.chat(messages) if prompt is None else prompt

    def _generate(self, prompt: list[int]) -> list[int]:
        ends = self.lm.tokenizer.eos_ids
        following = self._resume(prompt)
        try:
            reply: list[int] = []
            while len(reply) < self.max_new_tokens and not (reply and reply[-1] in ends):
                reply.append(following.step(self.sampler))
        except BaseException:
            following.close()
            raise
        self.close()
        self._continuation = following
        return reply

    def _resume(self, prompt: list[int]) -> Continuation:
        """A continuation at the end of the prompt, over the rows that the last turn computed."""
        held = self._continuation
        if held is None:
            return self.lm.start(prompt)
        shared = len(commonprefix([held.tokens[: held.processed], prompt[:-1]]))
        child = held.fork(shared)
        child.tokens[-1] = prompt[shared]
        try:
            child.extend(prompt[shared + 1 :])
        except BaseException:
            child.close()
            raise
        return child

    def _request(self, runtime: "Runtime", prompt: list[int]) -> list[int]:
        (outcome,) = runtime.run(
            Request(
                f"conversation-{uuid.uuid4().hex}",
                tuple(prompt),
                self.max_new_tokens,
                sampler=self.sampler,
                eos=self.lm.tokenizer.eos_ids,
            )
        )
        if outcome.finish not in (Finish.LENGTH, Finish.EOS):
            raise ModelError(f"conversation: the reply ended early ({outcome.finish}) {outcome.error}".rstrip())
        return outcome.generated


def _continued(tokenizer: Tokenizer, history: list[int], messages: list[dict[str, str]]) -> list[int] | None:
    """The history and what the template writes after its reply; None where the pieces do not decode to their text."""
    # What follows the reply is what stays the same whatever the reply is.
    other = [[*messages[:-2], {**messages[-2], "content": reply}, messages[-1]] for reply in ("0", "1")]
    after = commonprefix([tokenizer.render(m)[::-1] for m in other])[::-1]
    if history[-1] in tokenizer.eos_ids:
        end = tokenizer.decode(history[-1:], skip_special=False)
        if after.startswith(end):
            after = after[len(end) :]
        else:
            history = history[:-1]
    return _joined(tokenizer, history, after)


def _edited(tokenizer: Tokenizer, history: list[int], text: str) -> list[int] | None:
    """The longest beginning of the history whose text begins `text`, and the rest of the text encoded."""
    common = len(commonprefix([tokenizer.decode(history, skip_special=False), text]))
    stream, at, ends = tokenizer.stream(skip_special=False), 0, []
    for count, token in enumerate(history, 1):
        at += len(stream.push(token))
        if at > common:
            break
        ends.append((count, at))
    # A boundary within a character is none: its text is not known before the next token.
    for count, at in reversed(ends):
        if tokenizer.decode(history[:count], skip_special=False) == text[:at]:
            return _joined(tokenizer, history[:count], text[at:])
    return None


def _joined(tokenizer: Tokenizer, history: list[int], text: str) -> list[int] | None:
    """History and the ids of a text after it; None if together they say something else."""
    joined = [*history, *tokenizer.encode_piece(text)]
    whole = tokenizer.decode(history, skip_special=False) + text
    return joined if tokenizer.decode(joined, skip_special=False) == whole else None
