"""The state file: unhealthy stays unhealthy over a restart, and nothing that is in the file can hurt."""

import asyncio
import errno
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.bus import Latest
from agent.files import write
from agent.log import About
from agent.model.facts import NVML
from agent.model.gpu import Gpu, MigDevice
from agent.model.health import (
    Condition,
    ConditionKey,
    Details,
    Evidence,
    InvolvedProcess,
    LeakKind,
    Reason,
    Recovery,
)
from agent.model.ids import GpuUuid, Placement
from agent.model.snapshot import Durable, Snapshot
from agent.model.structs import replace
from agent.sinks import statefile
from agent.sinks.statefile import COPY, StateFile, UnreadError, load, save
from agent.sinks.statefile_format import encoded
from agent.threads import in_daemon_thread
from tests.sinks.snapshots import node
from tests.sinks.stored_states import BOOT, FINDINGS, ORDERS, OTHER_BOOT, U0, U1, UNHEALTHY, condition, gpu


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state.json")


def saved(path: str, durable: Durable, boot: str = BOOT) -> bytes:
    raw = encoded(durable, boot_id=boot)
    write(path, raw)
    return raw


# What is read again


def test_what_was_written_is_read_back_within_one_boot(path: str) -> None:
    saved(path, UNHEALTHY)
    assert load(path, boot_id=BOOT) == UNHEALTHY


def test_without_a_file_nothing_is_known(path: str) -> None:
    assert load(path, boot_id=BOOT) is None


def test_a_reboot_cures_all_that_no_operator_has_to_clear(path: str) -> None:
    by_hand = condition(U1, recovery=Recovery.BY_HAND, code=64)
    cured = [condition(U0, recovery=recovery, code=code) for code, recovery in enumerate(Recovery, start=100)]
    conditions = (*(each for each in cured if each.recovery is not Recovery.BY_HAND), by_hand)
    saved(path, replace(UNHEALTHY, conditions=conditions))
    restored = load(path, boot_id=OTHER_BOOT)
    assert restored is not None
    assert [each.key for each in restored.conditions] == [by_hand.key]


def test_under_another_boot_id_every_since_is_zero(path: str) -> None:
    saved(path, replace(UNHEALTHY, conditions=(condition(U0, recovery=Recovery.BY_HAND),)))
    restored = load(path, boot_id=OTHER_BOOT)
    assert restored is not None
    (kept,) = restored.conditions
    assert (kept.since_ns, kept.last_ns, kept.clean_probes, kept.reset_seen) == (0, 0, 0, False)
    assert kept.count == 3


def test_after_a_reboot_no_gpu_is_known(path: str) -> None:
    saved(path, replace(UNHEALTHY, conditions=(condition(U1, recovery=Recovery.BY_HAND),)))
    restored = load(path, boot_id=OTHER_BOOT)
    assert restored is not None
    assert (restored.gpus, restored.xids) == ((), ())


def test_holds_survive_a_reboot_and_a_release_does_not(path: str) -> None:
    holds = ((str(U0), "noisy fan"), ("0000:3b:00.0", "slot under test"))
    held = replace(
        condition(U0, recovery=Recovery.BY_HAND), key=condition(U0).key._replace(reason=Reason.HELD)
    )
    asked = Durable(
        gpus=(gpu(U0),),
        conditions=(held,),
        holds=holds,
        released_gpus=(U0,),
        released_until_ns=99,
        module_inode=7,
    )
    saved(path, asked)
    assert load(path, boot_id=BOOT) == asked
    assert load(path, boot_id=OTHER_BOOT) == Durable(holds=holds)


def test_an_unreadable_boot_id_is_another_boot(path: str) -> None:
    saved(path, UNHEALTHY, boot="")
    restored = load(path, boot_id="")
    assert restored is not None
    assert restored.conditions == ()


names = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(0, 2**63 - 1)
gpus = st.builds(
    Gpu,
    uuid=names.map(GpuUuid),
    index=st.integers(0, 64),
    minor=st.none() | st.integers(0, 255),
    name=names,
    pci=names,
    memory_bytes=st.none() | st.integers(1, 2**63 - 1),
    compute_capability=st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99)),
    numa_node=st.none() | st.integers(0, 64),
    serial=st.none() | names,
    part_number=st.none() | names,
    vbios=st.none() | names,
    inforom=st.none() | names,
    mig_enabled=st.booleans(),
    mig_devices=st.lists(
        st.builds(MigDevice, names, st.integers(0, 15), st.integers(0, 15), names, numbers), max_size=3
    ).map(tuple),
)


figures = st.none() | numbers
details = st.builds(
    Details,
    kind=st.sampled_from(LeakKind),
    involved=st.lists(
        st.builds(
            InvolvedProcess,
            pid=numbers,
            start_ticks=numbers,
            comm=names,
            owner=st.sampled_from(["pod", "host"]),
            pod=st.none() | names,
            state=st.sampled_from(["S", "D"]),
            killable=st.booleans(),
            contexts=figures,
            used_bytes=figures,
            since_ns=numbers,
            role=st.sampled_from(["holder", "owner"]),
        ),
        max_size=2,
    ).map(tuple),
    more=numbers,
    contexts=figures,
    used_bytes=figures,
    incomplete=st.booleans(),
    certainty=st.sampled_from(["verified", "unverified"]),
    critical=st.booleans(),
)


@st.composite
def durables(draw: st.DrawFn) -> Durable:
    known = draw(st.lists(gpus, max_size=4, unique_by=lambda each: each.uuid))
    if not known:
        return Durable()
    uuids = st.sampled_from([each.uuid for each in known])
    conditions = st.builds(
        Condition,
        key=st.builds(
            ConditionKey,
            st.just(NVML),
            st.sampled_from(Reason),
            st.builds(Placement, uuids, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
            st.integers(0, 999),
        ),
        evidence=st.sampled_from(Evidence),
        recovery=st.sampled_from(Recovery),
        flips=st.booleans(),
        message=names,
        since_ns=numbers,
        last_ns=numbers,
        count=numbers,
        clean_probes=numbers,
        clean_since_ns=numbers,
        reset_seen=st.booleans(),
        lasts=st.booleans(),
        details=st.none() | details,
    )
    return Durable(
        gpus=tuple(known),
        conditions=tuple(draw(st.lists(conditions, max_size=4))),
        xids=tuple(draw(st.lists(st.tuples(uuids, st.integers(-1, 200), numbers), max_size=4))),
        holds=tuple(draw(st.lists(st.tuples(names, names), max_size=4))),
        released_gpus=tuple(draw(st.lists(uuids, max_size=2))),
        released_until_ns=draw(st.none() | numbers),
        module_inode=draw(st.none() | numbers),
        kernel_log_read=draw(st.none() | numbers),
    )


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(durables())
def test_every_state_survives_a_restart(path: str, durable: Durable) -> None:
    saved(path, durable)
    assert load(path, boot_id=BOOT) == durable


# What can be in the file


def test_the_file_is_for_root_only(path: str) -> None:
    saved(path, UNHEALTHY)
    assert Path(path).stat().st_mode & 0o777 == 0o600


def unusable(path: str, caplog: pytest.LogCaptureFixture) -> str:
    """Load, expect that the state is lost, and return why."""
    with caplog.at_level(logging.ERROR):
        lost = load(path, boot_id=BOOT)
    (record,) = caplog.records
    assert record.message.startswith(f"Renamed the unusable state file {path}: it ")
    assert isinstance(record.args, About)
    assert lost == Durable(lost=f"{path} {record.args.get('detail')}")
    assert not Path(path).exists()
    assert Path(f"{path}.unusable").exists()
    return str(record.args.get("detail"))


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[]", b"null", b"\x00" * 99, b"[" * 100_000, b'{"version":1,"sha256":"","state":{}}']
)
def test_a_file_that_makes_no_sense_is_renamed_with_one_line(
    path: str, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    Path(path).write_bytes(raw)
    assert "damaged" in unusable(path, caplog)


def test_a_file_of_a_newer_version_is_renamed(path: str, caplog: pytest.LogCaptureFixture) -> None:
    raw = saved(path, UNHEALTHY)
    Path(path).write_bytes(raw.replace(b'"version":1', b'"version":2'))
    assert unusable(path, caplog) == "is of version 2, and this agent reads 1"


def test_a_file_that_is_too_long_is_renamed(path: str, caplog: pytest.LogCaptureFixture) -> None:
    Path(path).write_bytes(b" " * (statefile.MAX_BYTES + 1))
    assert "is over" in unusable(path, caplog)


@given(number=st.integers(0, 2**32), of_copy=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_bit_anywhere_forgets_nothing(path: str, number: int, *, of_copy: bool) -> None:
    save(path, encoded(UNHEALTHY, boot_id=BOOT))
    hit = Path(f"{path}{COPY}" if of_copy else path)
    raw = bytearray(hit.read_bytes())
    raw[number // 8 % len(raw)] ^= 1 << number % 8
    hit.write_bytes(raw)
    assert load(path, boot_id=BOOT) == UNHEALTHY


def test_a_file_that_vanished_is_made_up_for_by_its_copy(path: str) -> None:
    save(path, encoded(UNHEALTHY, boot_id=BOOT))
    Path(path).unlink()
    assert load(path, boot_id=BOOT) == UNHEALTHY


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES, errno.ENOMEM])
@pytest.mark.parametrize("copy", ["unread", "damaged", "absent", "good"])
def test_what_could_not_be_read_is_left_where_it_is(
    path: str, number: int, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(path, encoded(UNHEALTHY, boot_id=BOOT))
    other = f"{path}{COPY}"
    if copy == "absent":
        Path(other).unlink()
    if copy == "damaged":
        Path(other).write_bytes(b"{")
    read = statefile._read

    def fail(each: str) -> bytes | None:
        if each == path or copy == "unread":
            raise OSError(number, os.strerror(number))
        return read(each)

    before = sorted(each.name for each in Path(path).parent.iterdir())
    monkeypatch.setattr(statefile, "_read", fail)
    if copy == "good":
        assert load(path, boot_id=BOOT) == UNHEALTHY
    else:
        with pytest.raises(UnreadError, match=os.strerror(number)):
            load(path, boot_id=BOOT)
    assert sorted(each.name for each in Path(path).parent.iterdir()) == before


def test_no_more_is_written_than_is_read(path: str) -> None:
    with pytest.raises(OSError, match="over the"):
        save(path, bytes(statefile.MAX_BYTES + 1))
    assert not Path(path).exists()


def test_a_file_of_a_later_minor_version_is_read_as_far_as_it_is_known(path: str) -> None:
    body = json.loads(encoded(UNHEALTHY, boot_id=BOOT))["state"] | {"new": {"what": "ever"}}
    body["gpus"][0]["colour"] = "green"
    rewrite(path, body)
    assert load(path, boot_id=BOOT) == UNHEALTHY


def test_a_stored_condition_of_an_unknown_kind_is_discarded_and_logged(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.loads(encoded(UNHEALTHY, boot_id=BOOT))["state"]
    (known,) = body["conditions"]
    body["conditions"] += [known | {"reason": "gpu_on_fire"}, known | {"details": {"kind": "smoke"}}]
    rewrite(path, body)
    with caplog.at_level(logging.WARNING):
        assert load(path, boot_id=BOOT) == UNHEALTHY
    assert "gpu_on_fire" in caplog.text


@pytest.mark.parametrize(
    "wrong", [{"message": None}, {"source": None}, {"gi": "1"}, {"code": -0.5}, {"details": {"kind": 3}}]
)
def test_a_stored_condition_that_is_none_makes_the_file_unusable(
    path: str, wrong: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    body = json.loads(encoded(UNHEALTHY, boot_id=BOOT))["state"]
    body["conditions"][0] |= wrong
    rewrite(path, body)
    assert "damaged" in unusable(path, caplog)


def test_a_condition_of_a_gpu_that_is_not_in_the_file_is_kept_for_it(path: str) -> None:
    waiting = replace(UNHEALTHY, conditions=(condition(GpuUuid("GPU-9")),))
    saved(path, waiting)
    assert load(path, boot_id=BOOT) == waiting


def rewrite(path: str, body: dict[str, object]) -> None:
    """Write a state as an agent with other fields would: with a checksum that fits."""
    raw = json.dumps(body, separators=(",", ":"))
    checksum = hashlib.sha256(raw.encode()).hexdigest()
    Path(path).write_text(f'{{"version":1,"sha256":"{checksum}","state":{raw}}}', encoding="utf-8")


def test_the_first_release_wrote_this_file(path: str) -> None:
    sample = Path(__file__).with_name("state-0.1.0.json")
    Path(path).write_bytes(sample.read_bytes())
    assert load(path, boot_id=BOOT) == UNHEALTHY


def test_the_names_of_what_came_later_stay(path: str) -> None:
    for name, kept in (("orders", ORDERS), ("findings", FINDINGS)):
        sample = Path(__file__).with_name(f"state-{name}.json")
        Path(path).write_bytes(sample.read_bytes())
        assert load(path, boot_id=BOOT) == kept


# Writing


async def settled(state_file: StateFile, path: str, durable: Durable) -> None:
    """Wait until the file holds a state and the writer knows it."""
    async with asyncio.timeout(30):
        while await in_daemon_thread("reader", lambda: load(path, boot_id=BOOT)) != durable:
            await asyncio.sleep(0.01)
        while state_file.trouble is not None:
            await asyncio.sleep(0.01)


@pytest.fixture
def latest() -> Latest[Snapshot]:
    return Latest(replace(node(), durable=UNHEALTHY))


async def test_the_newest_state_is_written_on_change(path: str, latest: Latest[Snapshot]) -> None:
    state_file = StateFile(path, latest, boot_id=BOOT)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(state_file.run(), name="statefile")
        await settled(state_file, path, UNHEALTHY)
        latest.publish(replace(node(), durable=Durable(gpus=(gpu(U1),))))
        await settled(state_file, path, Durable(gpus=(gpu(U1),)))
        task.cancel()


async def test_a_new_condition_does_not_wait_for_the_pause_between_two_writes(
    path: str, latest: Latest[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statefile, "MIN_INTERVAL_S", 3600)
    worse = replace(UNHEALTHY, conditions=(*UNHEALTHY.conditions, condition(U1)))
    state_file = StateFile(path, latest, boot_id=BOOT)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(state_file.run(), name="statefile")
        await settled(state_file, path, UNHEALTHY)
        latest.publish(replace(node(), durable=replace(UNHEALTHY, xids=())))
        latest.publish(replace(node(), durable=worse))
        await settled(state_file, path, worse)
        task.cancel()


async def test_nothing_is_written_when_nothing_durable_changed(path: str, latest: Latest[Snapshot]) -> None:
    state_file = StateFile(path, latest, boot_id=BOOT)
    await state_file.flush(30)
    before = Path(path).stat().st_ino
    latest.publish(replace(node(), at_ns=5, durable=UNHEALTHY))
    await state_file.flush(30)
    assert Path(path).stat().st_ino == before


async def test_a_write_that_fails_is_logged_once_and_retried(
    tmp_path: Path, latest: Latest[Snapshot], caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "missing"
    path = str(directory / "state.json")
    state_file = StateFile(path, latest, boot_id=BOOT)
    with caplog.at_level(logging.INFO):
        await state_file.flush(30)
        latest.publish(replace(node(), durable=Durable(gpus=(gpu(U1),))))
        await state_file.flush(30)
        assert (state_file.trouble, state_file.failures) == ("No such file or directory", 2)
        directory.mkdir()
        await state_file.flush(30)
    assert state_file.trouble is None
    assert [record.msg.partition(":")[0] for record in caplog.records] == [
        "Could not write the state file %(path)s",
        "Wrote the state file again",
    ]


async def test_the_writer_goes_on_after_a_failure(
    tmp_path: Path, latest: Latest[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statefile, "RETRY_FIRST_S", 0.01)
    directory = tmp_path / "later"
    path = str(directory / "state.json")
    state_file = StateFile(path, latest, boot_id=BOOT)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(state_file.run(), name="statefile")
        async with asyncio.timeout(30):
            while state_file.failures < 2:
                await asyncio.sleep(0.01)
        directory.mkdir()
        await settled(state_file, path, UNHEALTHY)
        task.cancel()


async def test_the_last_write_waits_for_one_that_was_under_way_when_its_task_was_cancelled(
    path: str, latest: Latest[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, go_on, sync = threading.Event(), threading.Event(), os.fsync

    def slow_sync(descriptor: int) -> None:
        under_way.set()
        go_on.wait(30)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_sync)
    state_file = StateFile(path, latest, boot_id=BOOT)
    newest = Durable(gpus=(gpu(U1),))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(state_file.run(), name="statefile")
        await in_daemon_thread("wait", lambda: under_way.wait(30))
        task.cancel()
        latest.publish(replace(node(), durable=newest))
        flushing = group.create_task(state_file.flush(30), name="flush")
        await asyncio.sleep(0.1)  # enough for a second writer to spoil the first one's file
        go_on.set()
        await flushing

    assert (state_file.failures, state_file.trouble) == (0, None)
    assert await in_daemon_thread("reader", lambda: load(path, boot_id=BOOT)) == newest


async def test_all_states_are_written_by_one_thread(
    path: str, latest: Latest[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, sync = set(), os.fsync

    def noted_sync(descriptor: int) -> None:
        threads.add(threading.get_ident())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_sync)
    state_file = StateFile(path, latest, boot_id=BOOT)
    for number in range(5):
        latest.publish(replace(node(), durable=Durable(xids=((U1, 13, number),))))
        assert await state_file.flush(30)

    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_however_often_it_is_asked_one_write_at_a_time_hangs(
    latest: Latest[Snapshot], hanging_path: str, tmp_path: Path
) -> None:
    state_file = StateFile(hanging_path, latest, boot_id=BOOT)
    before = threading.active_count()
    for number in range(20):
        latest.publish(replace(node(), durable=Durable(xids=((U1, 13, number),))))
        assert not await state_file.flush(0.01)
    assert threading.active_count() <= before + 1
    # The next caller, when the disk answers again, has the newest state written.
    pipe = os.open(tmp_path / "state.json.new", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "state.json.new").unlink()
    assert await state_file.flush(30)
    os.close(pipe)
    newest = latest.value.durable
    assert await in_daemon_thread("reader", lambda: load(hanging_path, boot_id=BOOT)) == newest


async def test_a_disk_that_hangs_does_not_hold_up_the_end(
    tmp_path: Path, latest: Latest[Snapshot], hanging_path: str
) -> None:
    state_file = StateFile(hanging_path, latest, boot_id=BOOT)
    await state_file.flush(0.05)
    assert state_file.failures == 0


@pytest.fixture
def hanging_path(tmp_path: Path) -> Iterator[str]:
    """A place where opening the new file blocks: a named pipe without a reader."""
    pipe = tmp_path / "state.json.new"
    os.mkfifo(pipe)
    yield str(tmp_path / "state.json")
    # Let the thread go.
    with suppress(FileNotFoundError):
        os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
