"""Requests whose answers are known beforehand, computed alone, and what a server under load made of them.

requests = [KnownRequest(...), ...]
alone = compute_alone(llm, requests)
heard = await send_all(url, [request.ask() for request in requests])
check_load(heard, alone)            # nobody lost, and every answer the same to the last bit
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from octavo.core.sampling import SamplingParams
from octavo.llm.offline import LLM
from octavo.testing.load_client import Ask, Heard


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRequest:
    """A completion of token ids with a forced length.

    Args:
        seed: Of its draws; `None` is greedy.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    seed: int | None = None

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0.0 if self.seed is None else 1.0,
            seed=self.seed,
            ignore_eos=True,
            skip_special_tokens=False,
            logprobs=0,
        )

    def ask(self, *, due_s: float = 0.0, leaves_after_s: float | None = None, with_scores: bool = True) -> Ask:
        """Return it as it is sent, as a stream.

        Args:
            with_scores: Also ask for the tokens' log-probabilities: with them, two answers that are equal have the same
                tokens from the same logits. Without them, the server does exactly what an ordinary client makes it do.
        """
        body: dict[str, Any] = {
            "prompt": list(self.prompt_token_ids),
            "max_tokens": self.max_tokens,
            "temperature": 0.0 if self.seed is None else 1.0,
            "seed": self.seed,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Ask(body={**body, "logprobs": 0} if with_scores else body, due_s=due_s, leaves_after_s=leaves_after_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """What a request comes to when nothing else runs; a score for each token."""

    text: str
    scores: tuple[float, ...]


def random_requests(
    count: int,
    *,
    seed: int,
    vocab: range,
    max_prompt_tokens: int,
    max_output_tokens: int,
    num_shared_tokens: int = 0,
) -> list[KnownRequest]:
    """Return requests of random lengths, every other one seeded, half of them with a common beginning.

    Args:
        num_shared_tokens: Length of the common beginning.
    """
    random = Random(seed)
    shared = tuple(random.choice(vocab) for _ in range(num_shared_tokens))
    made = []
    for index in range(count):
        own = tuple(random.choice(vocab) for _ in range(random.randint(1, max_prompt_tokens)))
        made.append(
            KnownRequest(
                prompt_token_ids=shared + own if index % 4 < 2 else own,
                max_tokens=random.randint(1, max_output_tokens),
                seed=random.randrange(2**31) if index % 2 else None,
            )
        )
    return made


def compute_alone(llm: LLM, requests: Sequence[KnownRequest]) -> list[KnownAnswer]:
    """Answer each request with nothing beside it; `llm` should have no prefix cache, so that nothing comes before."""
    return [_alone(llm, request) for request in requests]


def _alone(llm: LLM, request: KnownRequest) -> KnownAnswer:
    (answer,) = llm.generate({"prompt_token_ids": request.prompt_token_ids}, request.params())[0].outputs
    assert answer.logprobs is not None and len(answer.token_ids) == request.max_tokens
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return KnownAnswer(text=answer.text, scores=tuple(scores[token_id].logprob for token_id, scores in pairs))


def check_load(heard: Sequence[Heard], alone: Sequence[KnownAnswer], *, with_scores: bool = True) -> Counter[str]:
    """Check that every client heard an end, and every answer is the one computed alone; return the ends.

    What a client got before it left has to be the beginning of that answer.

    Raises:
        AssertionError: names the request.
    """
    for index, (one, known) in enumerate(zip(heard, alone, strict=True)):
        assert one.fate != "lost", f"request {index} is lost: {one.why}"
        assert known.text.startswith(one.text), f"request {index}: {one.text!r} is not {known.text!r}"
        if with_scores:
            assert tuple(one.scores) == known.scores[: len(one.scores)], f"request {index}: its tokens differ"
        if one.fate == "answered":
            assert one.text == known.text, f"request {index}: {one.text!r} is not all of {known.text!r}"
            assert not with_scores or len(one.scores) == len(known.scores), f"request {index}: tokens are missing"
            assert one.num_tokens == len(known.scores), f"request {index}: {one.num_tokens} tokens were counted"
    return Counter(one.fate for one in heard)


def leaving_times(count: int, *, seed: int, longest_s: float) -> list[float | None]:
    """Return after how long each client leaves: a third of them at a random time, the others not."""
    random = Random(seed)
    return [random.uniform(0.0, longest_s) if index % 3 == 0 else None for index in range(count)]
