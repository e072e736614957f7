"""The peer as the person at the machine sees it: one `StatusReply`, and one line for each closed round."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from spes_p2p.core.ledger import commit_strength
from spes_p2p.core.members import Strength
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.net.limits import minute_now
from spes_p2p.net.reachability import Kind
from spes_p2p.net.relays import place_at
from spes_p2p.store.chain import Chain, Step
from spes_protocols import control_pb2
from spes_protocols.errors import NetworkError, printable
from spes_protocols.messages import MICRO, Ban, End, Start

if TYPE_CHECKING:
    from spes_p2p.peer.peer import Peer

REASON_ROUNDS = 64
"""How many commits back the reason of an organizer's order is looked for."""


def counted(number: int, noun: str) -> str:
    """A number of things in words."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def mean_loss(step: Step) -> float:
    """Token-weighted mean training loss of a commit's contributions, nats per token; 0 if there were none."""
    assert step.value is not None
    headers = [header.record for header in step.value.headers]
    tokens = sum(h.tokens for h in headers)
    return sum(h.loss * h.tokens for h in headers) / MICRO / tokens if tokens else 0.0


def round_line(step: Step, me: str, loss: float) -> str:
    """One line about a closed round."""
    assert step.value is not None
    value, after = step.value, step.after
    signers = [h.signer for h in value.headers]
    tokens = sum(h.record.tokens for h in value.headers)
    parts = [
        f"round {step.before.round}: {len(signers)} of {len(step.before.members)} contributions",
        f"{tokens} tokens",
        f"loss {loss:.3f}",
        f"state {after.state_root.hex()[:12]}",
    ]
    member = after.member(me)
    if member is not None:
        parts.append("my groups " + (",".join(map(str, member.groups)) or "none (standby)"))
    if step.before.member(me) is not None and me not in signers:
        parts.append("ours was not in it")
    if value.value.dropped:
        parts.append(_degraded(step))
    if value.refused:
        parts.append("refused: " + ", ".join(f"…{h.signer[-6:]} ({check})" for check, h in value.refused))
    return ", ".join(parts)


def _degraded(step: Step) -> str:
    """Who was left out of a commit that fewer than a quorum has made, and what that is worth."""
    assert step.value is not None
    dropped, electorate = step.value.value.dropped, step.before.electorate
    here = electorate.total - len(dropped)
    is_branch = commit_strength(step.before, step.value, step.votes) == Strength.ANY
    branch = ", which may be taken back" if is_branch else ""
    groups = ",".join(map(str, dropped))
    return f"closed by owners of {here} of {electorate.total} groups without groups {groups}{branch}"


def opening_line(step: Step) -> str:
    """One line about a start or a reset."""
    assert step.opening is not None
    record, owners = step.opening.record, counted(len(step.after.electorate.owners), "owner")
    if isinstance(record, Start):
        return f"the run starts: {owners}"
    reason = f" ({record.reason})" if record.reason else ""
    return f"the organizer has reset the run{reason}: on from round {record.round} with {owners}"


def order_reason(chain: Chain, me: str, kind: type[Ban] | type[End]) -> str:
    """What the organizer gave as the reason of an order, from the commit that carries it; with a colon before it."""
    last = chain.head.round - 1
    for number in range(last, max(-1, last - REASON_ROUNDS), -1):
        step = chain.commit_step(number)
        for order in step.value.orders if step is not None and step.value is not None else ():
            if isinstance(order.record, kind) and getattr(order.record, "peer", me) == me:
                return f": {printable(order.record.reason, 500)}" if order.record.reason else ""
    return ""


async def of(peer: Peer) -> control_pb2.StatusReply:
    """The status of a running peer."""
    head, trainer = peer.chain.head, peer.trainer
    me = peer.identity.peer_id
    reply = control_pb2.StatusReply(
        run_name=peer.manifest.name,
        run_id=head.run_id.hex(),
        organizer=peer.run_dir.manifest.signer,
        peer_id=me,
        phase=_phase(peer),
        round=head.round,
        state_root=head.state_root.hex(),
        steps=peer.manifest.phase(head.step).steps,
        tokens=head.tokens,
        bytes_up=peer.transport.bytes_up,
        bytes_down=peer.transport.bytes_down,
        last_error=peer.errors[-1] if peer.errors else "",
        trainer="none" if trainer is None else trainer.state,
        trainer_pid=0 if trainer is None else trainer.pid,
        groups_total=peer.manifest.ownership.groups,
        progress_text=peer.progress[0],
        progress=peer.progress[1],
        progress_bytes_per_second=peer.syncer.meter.bytes_per_second,
        progress_seconds_left=peer.syncer.meter.seconds_left,
        waiting=peer.waiting(),
        disk_bytes_max=peer.options.disk_bytes_max,
    )
    if trainer is not None and trainer.progress is not None and trainer.progress.text:
        reply.progress_text = trainer.progress.text
    if trainer is not None and trainer.progress is not None and trainer.progress.round == head.round:
        reply.step = trainer.progress.step
        reply.loss = trainer.progress.loss
        reply.tokens_per_second = trainer.progress.tokens_per_second
        reply.mfu = trainer.progress.mfu
    _add_limits(peer, reply)
    for m in head.members:
        reply.members.add(peer=m.peer, groups=m.groups, missed=m.missed, me=m.peer == me)
    for round_number, loss in peer.losses:
        reply.losses.add(round=round_number, train=loss)
    for name, seconds in _phase_seconds(peer).items():
        reply.phases.add(name=name, seconds=seconds)
    if peer.reach is not None and peer.reach.verdict.kind is not Kind.UNKNOWN:
        reply.reached, reply.observed = peer.reach.verdict.kind.value, peer.reach.observed
    if peer.options.relay:
        reply.relay_quotas = peer.options.relay_quotas.words()
    try:
        await _add_links(peer.transport, reply)
        reply.addresses.extend(await peer.transport.addresses())
        for relay in peer.transport.daemon.relays:
            reply.relays.add(address=relay, place=place_at(relay, reply.addresses))
    except NetworkError as error:
        reply.last_error = str(error)
    return reply


async def _add_links(transport: LibP2P, reply: control_pb2.StatusReply) -> None:
    """Every connection; of those through relays, through which and at what rate. Raises `NetworkError`."""
    relayed, rates = await transport.relayed(), transport.relay_rates
    used = {relay for relays in relayed.values() for relay in relays}
    await asyncio.gather(*(rates.look(relay) for relay in used if not rates.is_known(relay)))
    for other, path in sorted((await transport.links()).items()):
        relays = relayed.get(other, ())
        limits = [rate for relay in relays if (rate := rates.rate(relay)) is not None]
        reply.links.add(peer=other, path=path, relays=relays, relay_bytes_per_second=min(limits, default=0.0))


def _add_limits(peer: Peer, reply: control_pb2.StatusReply) -> None:
    """The limits in force for the line, where any were asked for."""
    up, down, minute = peer.options.max_up, peer.options.max_down, minute_now()
    if not (up.is_unlimited and down.is_unlimited):
        reply.limits = f"up {up.words(minute)}, down {down.words(minute)}"
        reply.limit_up_bytes_per_second = up.rate_at(minute) or 0.0
        reply.limit_down_bytes_per_second = down.rate_at(minute) or 0.0


def _phase_seconds(peer: Peer) -> dict[str, float]:
    """The peer's own clock, with the time until its header split up as the trainer tells."""
    clock, trainer = peer.shell.phases.seconds(), peer.publisher.seconds
    rest = max(0.0, clock["train"] - sum(trainer.values()))
    others = {name: seconds for name, seconds in clock.items() if name != "train"}
    return {"train": 0.0, "encode": 0.0} | trainer | {"publish": rest} | others


def _phase(peer: Peer) -> str:
    if peer.leaving:
        return "leaving"
    if not peer.ready:
        return "joining"
    phase = peer.shell.participant.phase
    if phase == "training" and peer.trainer is not None and peer.trainer.paused:
        return "paused"
    return phase
