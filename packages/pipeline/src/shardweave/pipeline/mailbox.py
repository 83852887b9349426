"""The values of one step on their way between stages.

The program says what to post when; here is how a value becomes messages. Every value sent forward is one
message per tensor, with a header in front while its shape is not agreed on, nor expected (see ``guesses``); a gradient
is one per tensor that requires one.

[Note: Tags and order]
    gloo matches messages by tag, so a receive of a header can be posted ahead and that of the tensors when
    the header has been read, in whatever order. NCCL ignores tags: what is posted first pairs up first. There
    a header is waited for where it is posted, and the tensors are posted right behind it. With agreed shapes
    there is no header and both post everything ahead. What is expected is posted ahead on gloo only: behind an escape
    come messages that only tags can tell from those posted meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardweave import comm
from shardweave.comm import Axis, Message, Pending

from .actions import Action
from .guesses import Guesses, escape, is_escape
from .programs import Transfer
from .values import HEADER_LENGTH, Headers, Signature

__all__ = ["Mailbox", "Shapes"]

_AGAIN = 64
"""What a tag is higher by behind an escape. A header and the tensors that it tells of are fewer."""
_PARTS = 2 * _AGAIN
"""Tags of one value."""
_STAGES = 4096
_TAGS = 1 << 30
"""Tags are below this number (comm's rule); values so far apart that their tags meet pair up by order."""


@dataclass
class Shapes:
    """What each stage passes on, agreed on in the first step where shapes are fixed."""

    dynamic: bool
    """Whether shapes may change; then every value has a header, in every step."""
    agreed: dict[int, Signature] = field(default_factory=dict)
    """By stage, what it passes forward."""
    settled: bool = False
    """Whether a whole step has run, so that both ends know the shapes."""
    encoding: Headers = field(default_factory=Headers)
    """Headers that were sent or read before."""
    guesses: Guesses = field(default_factory=Guesses)
    """Where shapes may change: what goes without a header all the same."""

    @property
    def headers(self) -> bool:
        """Whether values carry headers in this step."""
        return self.dynamic or not self.settled

    def check(self, action: Action, signature: Signature) -> None:
        """Raises ValueError when fixed shapes were asked for and ``action``'s value deviates."""
        if self.dynamic:
            return
        expected = self.agreed.setdefault(action.stage, signature)
        if signature != expected:
            raise ValueError(
                f"stage {action.stage} passes on {signature} for micro-batch {action.micro_batch}, after "
                f"{expected} before; with dynamic_shapes=False all are alike: use dynamic_shapes=True, or "
                "leave out the smaller last batch"
            )


class Mailbox:
    """Takes values from the stages of this rank, and gives the stages what they need.

    ``exchange`` posts messages and gives a handle for each, in order: ``comm.exchange`` between processes.
    """

    def __init__(
        self,
        axis: Axis,
        shapes: Shapes,
        device: torch.device,
        *,
        tagged: bool,
        exchange: Callable[[Sequence[Message]], list[Pending[Tensor]]] = comm.exchange,
    ) -> None:
        self._axis, self._shapes, self._device, self._tagged = axis, shapes, device, tagged
        self._headers_go = shapes.headers
        self._post = exchange
        self._outgoing: dict[Action, tuple[Tensor, ...]] = {}
        self._signatures: dict[Action, Signature] = {}  # of forward values, put or taken
        self._sending: dict[Action, list[Pending[Tensor]]] = {}
        self._headers: dict[Action, tuple[Pending[Tensor], int]] = {}  # with the rank it comes from
        # What arrives without a header, and might be an escape; likewise.
        self._expected: dict[Action, int] = {}
        self._arriving: dict[Action, list[Pending[Tensor]]] = {}

    def put(self, action: Action, tensors: tuple[Tensor, ...], signature: Signature | None = None) -> None:
        """Hands in what ``action`` produced: a value with its signature, or gradients without.

        Raises:
            ValueError: the shape deviates from what was agreed on.
        """
        if signature is not None:
            self._shapes.check(action, signature)
            self._signatures[action] = signature
        self._outgoing[action] = tensors

    def take(self, action: Action) -> tuple[Tensor, ...]:
        """What ``action`` produced, once it is there; each value is taken once."""
        here = self._outgoing.pop(action, None)
        if here is not None:  # the neighbouring stage is on this rank
            return here
        if self._headers_go:
            self._read_header(action)
        tensors = tuple([pending.wait() for pending in self._arriving.pop(action)])
        peer = self._expected.pop(action, None)
        if peer is None or not is_escape(tensors[0]):
            return tensors
        self._headers[action] = self._post([self._header_from(peer, action)])[0], peer
        self._read_header(action, _AGAIN)
        return tuple([pending.wait() for pending in self._arriving.pop(action)])

    def take_gradient(self, stage: int, micro_batch: int) -> tuple[Tensor, ...]:
        """What the backward of ``stage`` produced, be it a whole one or the input's half."""
        half = Action("I", stage, micro_batch)
        is_half = half in self._outgoing or half in self._arriving
        return self.take(half if is_half else Action("B", stage, micro_batch))

    def signature(self, action: Action) -> Signature:
        """The signature of a forward value that was put or taken."""
        return self._signatures[action]

    def post(self, transfers: Sequence[Transfer]) -> None:
        """Posts sends and receives in this order, without waiting, but see [Note: Tags and order]."""
        if self._tagged or not self._headers_go:
            self._exchange([(transfer, self._messages(transfer)) for transfer in transfers])
            self._settle_done()  # not before: what is posted is waited for
            return
        for transfer in transfers:
            messages = self._messages(transfer)
            headers = 1 if self._is_headed(transfer.action) else 0
            self._exchange([(transfer, messages[:headers])])
            if transfer.is_send:
                self._exchange([(transfer, messages[headers:])])
            elif headers:
                self._read_header(transfer.action)
            else:
                self._exchange([(transfer, messages)])
        self._settle_done()

    def finish(self) -> None:
        """A whole step has run, on all ranks alike."""
        self._shapes.settled = True
        if self._shapes.dynamic:
            self._shapes.guesses.note(self._signatures)

    def settle(self, actions: Sequence[Action]) -> None:
        """Waits until what these actions produced has been sent, and lets go of it."""
        for action in actions:
            for pending in self._sending.pop(action, ()):
                pending.wait()

    def _settle_done(self) -> None:
        """Lets go of what is known to have been sent, the oldest first.

        The program settles a send when something proves that it is over, which in GPipe is late. NCCL says so
        itself; gloo does not.
        """
        while self._sending:
            action = next(iter(self._sending))
            if not all(pending.done() for pending in self._sending[action]):
                return
            self.settle([action])

    def _exchange(self, batch: Sequence[tuple[Transfer, list[Message]]]) -> None:
        """Posts the messages of several transfers together and files the handles."""
        handles = self._post([message for _, messages in batch for message in messages])
        end = 0
        for transfer, messages in batch:
            begin, end = end, end + len(messages)
            mine, action = handles[begin:end], transfer.action
            if transfer.is_send:
                self._sending.setdefault(action, []).extend(mine)
            elif mine and self._is_headed(action) and action not in self._expected:
                self._headers[action] = (mine[0], transfer.peer)
            else:
                self._arriving[action] = mine

    def _messages(self, transfer: Transfer) -> list[Message]:
        action, peer = transfer.action, transfer.peer
        headed = self._is_headed(action)
        expected = self._shapes.guesses.of(action) if headed and self._tagged else None
        if transfer.is_send:
            tensors = self._outgoing.pop(action)
            if not headed:
                return self._sends(action, peer, tensors)
            if expected is None:
                return [self._header_to(peer, action), *self._sends(action, peer, tensors)]
            return self._expected_sends(action, peer, tensors, expected)
        if expected is not None:
            self._signatures[action], self._expected[action] = expected, peer
        elif headed:
            return [self._header_from(peer, action)]
        elif action.kind == "F":
            self._signatures[action] = self._shapes.agreed[action.stage]
        return self._receives(action, peer)

    def _expected_sends(
        self, action: Action, peer: int, tensors: tuple[Tensor, ...], expected: Signature
    ) -> list[Message]:
        """Sends of a value that the receiver takes to be like ``expected``. See [Note: The escape]."""
        signature = self._signatures[action]
        if signature is expected or signature == expected:
            first = tensors[0].resolve_neg().contiguous()
            if not is_escape(first):
                return self._sends(action, peer, (first, *tensors[1:]))
        return [
            *self._sends(action, peer, escape(expected, self._device)),
            self._header_to(peer, action),
            *self._sends(action, peer, tensors, _AGAIN),
        ]

    def _sends(self, action: Action, peer: int, tensors: Sequence[Tensor], first: int = 0) -> list[Message]:
        return [
            Message.send(tensor, self._axis, peer, self._tag(action, part))
            for part, tensor in enumerate(tensors, start=first + 1)
        ]

    def _header_to(self, peer: int, action: Action) -> Message:
        header = self._shapes.encoding.encode(
            self._signatures[action], f"the output of stage {action.stage}", self._device
        )
        return Message.send(header, self._axis, peer, self._tag(action, 0))

    def _header_from(self, peer: int, action: Action) -> Message:
        header = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self._device)
        return Message.receive(header, self._axis, peer, self._tag(action, 0))

    def _receives(self, action: Action, peer: int, first: int = 0) -> list[Message]:
        """Receives of the tensors of a value whose signature is known."""
        if action.kind == "F":
            buffers = self._signatures[action].empty(self._device)
        else:
            forward = Action("F", action.stage - 1, action.micro_batch)
            buffers = self._signatures[forward].empty_gradients(self._device)
        return [
            Message.receive(buffer, self._axis, peer, self._tag(action, part))
            for part, buffer in enumerate(buffers, start=first + 1)
        ]

    def _read_header(self, action: Action, first: int = 0) -> None:
        """Waits for the header of ``action``'s value, if it has one, and posts the receives of the tensors."""
        if action not in self._headers:
            return
        header, peer = self._headers.pop(action)
        signature = self._signatures[action] = self._shapes.encoding.decode(header.wait())
        if not self._shapes.dynamic:
            self._shapes.agreed.setdefault(action.stage, signature)
        self._arriving[action] = self._post(self._receives(action, peer, first))

    def _is_headed(self, action: Action) -> bool:
        return self._headers_go and action.kind == "F"

    def _tag(self, action: Action, part: int) -> int:
        """The same number on both ends, different for all messages that can be under way together."""
        if not self._tagged:
            return 0
        value = (2 * action.micro_batch + (action.kind != "F")) * _STAGES + action.stage
        return (value * _PARTS + part) % _TAGS
