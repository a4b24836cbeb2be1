"""The NVML source: initialises NVML, watches its GPUs, and shuts NVML down when the driver is gone.

Guarantees:

1. The loop never waits for the driver: a daemon thread (threads) makes every call and has
   a deadline. One call is in flight for each GPU, so a stuck GPU costs one thread, however often it
   is polled.
2. NVML is initialised once and stays initialised. Only when no GPU answers any more is it shut down and
   initialised again, at most once in ``init_retry_ns``, without a limit of attempts: a library or driver
   that appears later is found, and while there is none the agent holds none of its files.
3. One fact for a change, not for a retry.
4. After ``release`` no file of the driver is open: DriverReleased is emitted when that was verified, not
   when it was requested. A call that hangs delays it, and is reported like any other overdue call.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from agent.bus import Inbox
from agent.core.freshness import Terms
from agent.errors import NvmlCode, NvmlError, NvmlOverdueError, SourceError
from agent.log import about
from agent.model import facts
from agent.model.components import NVML_EVENTS, NVML_NODE
from agent.model.health import Reason
from agent.model.ids import ComponentId, GpuUuid
from agent.proofs import Proofs
from agent.sources.nvml.fd_table import open_files_below
from agent.sources.nvml.gpu_watcher import DriverGoneError, cancel_and_wait
from agent.sources.nvml.hotplug import BindEvents
from agent.sources.nvml.library import (
    LibraryLocation,
    LibraryMissingError,
    LoadedLibrary,
    Nvml,
    Versions,
    load,
)
from agent.sources.nvml.session import Session, SessionContext
from agent.sources.nvml.settings import MAX_THREADS, NvmlSettings
from agent.sources.nvml.threads import Call, ThreadGroup, WorkerThread
from agent.waiting import wait_set

__all__ = ["MAX_THREADS", "LibraryLocation", "NvmlSettings", "NvmlSource"]

_log = logging.getLogger(__name__)


class NvmlSource:
    """Owns NVML and every thread that may call it."""

    def __init__(
        self,
        *,
        inbox: Inbox[facts.Fact],
        library: LibraryLocation,
        dev_root: Path,
        sys_root: Path,
        proc_root: Path,
        clock: Callable[[], int],
        settings: NvmlSettings | None = None,
        released: bool = False,
        calls_devices: Callable[[], bool] = lambda: False,
        proofs: Proofs | None = None,
    ) -> None:
        """``dev_root``, ``sys_root`` and ``proc_root`` are what stands for /dev, /sys and /proc.

        ``calls_devices``: whether each probe also calls the driver on the GPU's own device file.
        ``released`` starts as after ``release``. ``proofs`` are those of the event thread and of the node;
        each GPU's prober proves itself by its facts.
        """
        self._settings = settings if settings is not None else NvmlSettings()
        self._inbox = inbox
        self._location = library
        self._clock = clock
        self._proofs = proofs if proofs is not None else Proofs(clock=clock)
        self._threads = ThreadGroup(
            keep=(inbox.wake_fd,),
            deadline_ns=self._settings.deadline_ns,
            clock=clock,
            maximum=self._settings.max_threads,
        )
        self._first_nvml = Nvml(self._threads.first.log)
        self._bind_events = BindEvents()
        self._context = SessionContext(
            inbox=inbox,
            threads=self._threads,
            settings=self._settings,
            dev_root=dev_root,
            sys_root=sys_root,
            proc_root=proc_root,
            clock=clock,
            on_node_overdue=self._on_node_overdue,
            on_node_answered=self._on_node_answered,
            bind_events=self._bind_events,
            proofs=self._proofs,
            calls_devices=calls_devices,
        )
        self._device_paths = ("/dev/nvidia", f"{dev_root}/nvidia")
        self._wanted, self._unwanted = asyncio.Event(), asyncio.Event()
        (self._unwanted if released else self._wanted).set()
        self._session: Session | None = None
        self._library: LoadedLibrary | None = None
        self._open_inits = 0
        self._closed = False
        self._next_init_ns = clock()
        self._events_worker: WorkerThread | None = None
        self._overdue: dict[WorkerThread, Call] = {}
        self._unavailable: facts.DriverUnavailable | None = None
        self._first_outcome = asyncio.Event()
        self._first_failure: SourceError | None = None
        self.library_missing_since_ns: int | None = None
        """Since when no driver library has been found; None while one is loaded."""
        self.library_replaced = False
        """Whether the library on disk differs from the loaded one, and the loaded one does not match
        the driver: only a new process can load it."""

    async def run(self) -> None:
        """Watch until cancelled. May be run again afterwards; two at once are not allowed."""
        self._threads.abandon_hung()
        events_worker = await self._start_threads()
        if self._session is not None:
            # The last run was cancelled in the middle of it.
            self._session.ignore_pending_calls()
            await self._release_driver(self._settings.call_deadline_ns)
        while True:
            if self._unwanted.is_set():
                await self._stay_released()
            await self._watch_while_wanted(events_worker)

    def request(self) -> None:
        """Probe every GPU now. Does not wait; without a driver, the next init probes them anyway."""
        if self._session is not None:
            self._session.request()

    def request_gpu(self, uuid: GpuUuid) -> None:
        """Probe one GPU, with its MIG devices, now. Does not wait; does nothing without a driver."""
        if self._session is not None:
            self._session.request_gpu(uuid)

    def restart_gpu(self, uuid: GpuUuid) -> None:
        """Restart the stale prober of a GPU. Does not wait; does nothing without a driver."""
        if self._session is not None:
            self._session.restart_gpu(uuid)

    def restart_events(self) -> None:
        """Restart the stale wait for XIDs. Does not wait; does nothing without a driver."""
        if self._session is not None:
            self._session.restart_events()

    def probe_soon(self, uuid: GpuUuid) -> None:
        """Probe one GPU with every reading, at most once a second. Does not wait."""
        if self._session is not None:
            self._session.probe_soon(uuid)

    def release(self) -> None:
        """Release the driver until ``resume``. Does not wait: DriverReleased reports that it is released."""
        self._wanted.clear()
        self._unwanted.set()

    def resume(self) -> None:
        """Use the driver again after ``release``, at once and as at the start. Does not wait."""
        self._unwanted.clear()
        self._wanted.set()

    @property
    def start_terms(self) -> Terms:
        """When NVML has to give its first proof, and each further one while it is not initialised."""
        return Terms(self._settings.poll_ns, self._settings.init_deadline_ns)

    async def wait_first_outcome(self) -> None:
        """Return once NVML was initialised for the first time.

        Raises SourceError if the first attempt failed or is past its deadline.
        """
        await self._first_outcome.wait()
        if self._first_failure is not None:
            raise self._first_failure

    async def close(self) -> bool:
        """Shut NVML down and stop the threads, after ``run`` has returned.

        Returns False if a thread is stuck in the driver: then NVML cannot be shut down, the threads
        still use the inbox's descriptor, and only ``os._exit`` stops the process.
        """
        if self._closed:
            return True
        if self._session is not None:
            self._session.ignore_pending_calls()
        if not await self._release_driver(self._settings.close_wait_ns):
            return False
        await self._threads.stop()
        self._closed = True
        return True

    async def _start_threads(self) -> WorkerThread:
        await self._threads.start()
        if self._events_worker is None:
            if self._threads.shared_files is not None:
                _log.warning(
                    "Threads that call the driver share the agent's files (%(detail)s): one that hangs keeps"
                    " them open",
                    about(detail=self._threads.shared_files),
                )
            self._events_worker = await self._threads.start_worker("nvml-events")
            for worker in (self._threads.first, self._events_worker):
                self._watch_node_worker(worker)
        return self._events_worker

    def _watch_node_worker(self, worker: WorkerThread) -> None:
        worker.on_overdue = lambda call: self._on_node_overdue(worker, call)
        worker.on_answered = lambda call: self._on_node_answered(worker, call)

    # Up and down

    async def _watch_while_wanted(self, events_worker: WorkerThread) -> None:
        loop = asyncio.get_running_loop()
        watching = loop.create_task(self._watch(events_worker), name="nvml watch")
        leaving = loop.create_task(self._unwanted.wait(), name="nvml release")
        try:
            await asyncio.wait({watching, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(watching, leaving)
        if not watching.cancelled():
            watching.result()

    async def _watch(self, events_worker: WorkerThread) -> None:
        while True:
            versions = await self._bring_up()
            session = self._session = Session(self._context, versions=versions, events_worker=events_worker)
            try:
                await session.run()
            except DriverGoneError as gone:
                session.ignore_pending_calls()
                await self._emit_unavailable(gone.error, was_ready=session.ready_emitted)
                if not session.ready_emitted:
                    # Init succeeds and yet no GPU answers: one init a second would be wasted.
                    poll_ns = max(self._settings.poll_ns, self._settings.init_retry_ns)
                    self._next_init_ns = self._clock() + poll_ns
            await self._release_driver(self._settings.call_deadline_ns)

    async def _stay_released(self) -> None:
        """Release the driver, emit DriverReleased, and return when the driver is wanted again."""
        self._first_outcome.set()
        self.library_missing_since_ns = None
        self._proofs.waive(ComponentId(NVML_EVENTS))
        warned: set[str] = set()
        while not self._wanted.is_set():
            hindrance = await self._find_hindrance()
            if hindrance is None:
                self._inbox.put(facts.DriverReleased())
                self._proofs.waive(ComponentId(NVML_NODE))
                await self._wanted.wait()
                break
            self._proofs.prove(ComponentId(NVML_NODE))
            what, detail = hindrance
            if what not in warned:
                warned.add(what)
                _log.warning(
                    "Could not release the driver yet: %(what)s, %(detail)s", about(what=what, detail=detail)
                )
            await wait_set(self._wanted, self._settings.init_retry_ns)
        self._unavailable = None
        self._next_init_ns = self._clock()

    async def _find_hindrance(self) -> tuple[str, list[str]] | None:
        """Release what can be released; returns what is still open, and which; None if nothing is."""
        if not await self._release_driver(self._settings.init_retry_ns):
            calls = (worker.log.current for worker in self._threads.workers)
            return "calls under way", [call.name for call in calls if call is not None]
        if self._open_inits:
            return "NVML cannot be shut down", []
        paths = await self._threads.first.call(partial(open_files_below, self._device_paths))
        return ("open files", paths) if paths else None

    async def _bring_up(self) -> Versions:
        self._proofs.expect(ComponentId(NVML_NODE), self.start_terms)
        while True:
            await asyncio.sleep(max(0, self._next_init_ns - self._clock()) / 1e9)
            self._next_init_ns = self._clock() + self._settings.init_retry_ns
            try:
                versions = await self._threads.first.call(self._initialise)
            except (LibraryMissingError, NvmlError) as error:
                await self._emit_unavailable(error)
            else:
                self.library_missing_since_ns = None
                self.library_replaced = False
                self._first_outcome.set()
                return versions
            finally:
                self._proofs.prove(ComponentId(NVML_NODE))

    def _initialise(self) -> Versions:
        if self._library is None:
            self._library = load(self._location)
        # While a thread is stuck in NVML it cannot be shut down, and another init would only count;
        # the driver may answer the other threads all the same.
        if not (self._open_inits and self._threads.stuck):
            self._shut_down()
            self._first_nvml.init()
            self._open_inits += 1
        return self._first_nvml.versions()

    async def _release_driver(self, timeout_ns: int) -> bool:
        """Shut NVML down if no thread is in it; returns whether none is."""
        session = self._session
        if session is not None:
            session.listener.stop()
        if self._threads.stuck or not await self._threads.wait_idle(timeout_ns):
            return False
        if self._open_inits:
            if session is not None:
                await session.listener.free()
            await self._threads.first.call(self._shut_down)
        if session is not None:
            session.ignore_pending_calls()
        self._session = None
        return True

    def _shut_down(self) -> None:
        if self._open_inits:
            self._bind_events.close(self._first_nvml)
        try:
            while self._open_inits:
                self._first_nvml.shutdown()
                self._open_inits -= 1
        except NvmlError as error:
            # The shutdown may fail where the driver is gone; it is retried before the next init.
            if error.code == NvmlCode.UNINITIALIZED:
                self._open_inits = 0

    # Facts

    async def _emit_unavailable(
        self, error: LibraryMissingError | NvmlError, *, was_ready: bool = False
    ) -> None:
        # Without a driver no event arrives, which the conditions of every GPU show.
        self._proofs.waive(ComponentId(NVML_EVENTS))
        if isinstance(error, LibraryMissingError):
            self.library_missing_since_ns = self.library_missing_since_ns or self._clock()
        else:
            self.library_missing_since_ns = None
        fact = await self._unavailable_fact(error)
        if not self._first_outcome.is_set():
            self._first_failure = SourceError(fact.message)
            self._first_outcome.set()
        if fact == self._unavailable and not was_ready:
            return
        self._unavailable = fact
        self._inbox.put(fact)
        # The fact clears the overdue calls from the state, but these are still overdue.
        for worker, call in self._overdue.items():
            self._on_node_overdue(worker, call)

    async def _unavailable_fact(self, error: LibraryMissingError | NvmlError) -> facts.DriverUnavailable:
        if isinstance(error, LibraryMissingError):
            return facts.DriverUnavailable(reason=Reason.DRIVER_NOT_LOADED, message=str(error))
        if error.code == NvmlCode.LIB_RM_VERSION_MISMATCH and self._library is not None:
            return await self._mismatch_fact(self._library)
        if error.code == NvmlCode.DRIVER_NOT_LOADED:
            return facts.DriverUnavailable(
                reason=Reason.DRIVER_NOT_LOADED,
                message="The NVIDIA kernel driver is not loaded: load it with 'modprobe nvidia', "
                "or see in the kernel log why it did not load",
                unloaded=True,
            )
        if error.code == NvmlCode.NO_PERMISSION:
            return facts.DriverUnavailable(
                reason=Reason.DRIVER_NOT_LOADED, message=f"The NVIDIA driver may not be used: {error}"
            )
        return facts.DriverUnavailable(
            reason=Reason.DRIVER_NOT_LOADED,
            message=f"The NVIDIA driver does not work: {error}; see the kernel log, and reload the driver",
        )

    async def _mismatch_fact(self, library: LoadedLibrary) -> facts.DriverUnavailable:
        self.library_replaced = await self._threads.first.call(library.was_replaced)
        next_step = (
            "the library on disk is a newer one, so restart the agent"
            if self.library_replaced
            else "reboot the node, or load the kernel driver of the library's version"
        )
        return facts.DriverUnavailable(
            reason=Reason.NVML_VERSION_MISMATCH,
            message=f"NVML library {library.name} and the NVIDIA kernel driver are of different versions: "
            f"{next_step}",
        )

    def _on_node_overdue(self, worker: WorkerThread, call: Call) -> None:
        self._overdue[worker] = call
        deadline_ns = self._settings.deadline_ns(call.name)
        if not self._first_outcome.is_set():
            self._first_failure = NvmlOverdueError(call.name, deadline_ns)
            self._first_outcome.set()
        self._inbox.put(facts.DriverCallOverdue(call=call.name, deadline_ns=deadline_ns))

    def _on_node_answered(self, worker: WorkerThread, call: Call) -> None:
        if self._overdue.pop(worker, None) is not None and not self._overdue:
            self._inbox.put(facts.DriverCallAnswered(call=call.name))
