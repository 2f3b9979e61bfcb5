"""Claim a member's place under a fence, so that two lives of one rank are told apart.

A trainer rank has one life a fence: started again with the same token it could save a state that the
others have left behind, so it is refused and a new fence is due. Other roles count up their lives
(protocol R26).
"""

from __future__ import annotations

import os
import socket

from ckptstore.clock import Clock
from ckptstore.errors import AlreadyExistsError
from ckptstore.journal import new_id
from ckptstore.manifest import Member
from ckptstore.store.base import Store
from ckptstore.wire import canonical, load_json
from ckptstore.writer import create_contended

LIVES_MAX = 1000


def claim_key(fence: int, member: Member, life: int) -> str:
    return f"members/f{fence:04d}/{member.file}-{life:03d}"


def claim(store: Store, clock: Clock, fence: int, member: Member, *, single: bool) -> int:
    """Claim the next free life of a member and return its number; durable on return.

    AlreadyExistsError: the member is `single` and another process has its one life.
    """
    for life in range(LIVES_MAX):
        key = claim_key(fence, member, life)
        write = new_id()
        data = canonical(
            {"write": write, "host": socket.gethostname(), "pid": os.getpid(), "at": clock.now()}
        )
        held = create_contended(store, key, data)
        if held == data:
            return life
        if single:
            found = load_json(held, key)
            raise AlreadyExistsError(
                f"{member} already lives under fence {fence}, claimed at {found.get('at')} by pid "
                f"{found.get('pid')} on {found.get('host')}: a rank that starts again needs a new fence, so call "
                f"begin anew and restore all ranks",
                key=key,
                member=str(member),
            )
    raise AlreadyExistsError(
        f"{member} has had {LIVES_MAX} lives under fence {fence}: begin anew", member=str(member)
    )
