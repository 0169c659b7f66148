"""Predicts the memory of a training step: the live values of each segment, and the peak.

A segment of ONNX Runtime holds its inputs until it ends, but a value of the forward that only calls of kernels read in
the backward is free after its last reader, as in PyTorch. Sizes are those that the graph was captured with.

ONNX Runtime and PyTorch allocate from the same memory and free a value's memory there. On a CUDA device whose provider
has an arena of its own, a step takes more than is predicted here, since an arena keeps free chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from torch import fx
from torch.fx.node import Argument

from ort_accel.executor.reuse_operands import is_reusable, replaceable
from ort_accel.graph.nodes import is_getitem, is_view, output_bytes, output_nodes_of, returned, writes
from ort_accel.kernels.bit_mask import own as bits
from ort_accel.kernels.host_copies import is_on_host, own
from ort_accel.operators.facts import facts
from ort_accel.partition.segments import Cut
from ort_accel.partition.split_at_gradients import Gradients
from ort_accel.recompute.backward_gradients import gradient_sources
from ort_accel.recompute.joint_graph import is_tensor, storage_owner, tensor_inputs
from ort_accel.recompute.live_memory import WORKSPACE, LiveMemory, Moment
from ort_accel.reporting.segments import Runner

Cutter = Callable[[fx.GraphModule, Gradients], list[Cut]]
"""Returns the segments of a graph that releases these gradients early. It may change the graph."""

OptimizerStates = Callable[[int], int]
"""Returns the bytes of optimizer states for trained parameters of so many bytes."""

UPDATE_TEMPORARIES = 2
"""Values of the size of a parameter that its update allocates, as PyTorch's AdamW does."""


@dataclass(frozen=True)
class StageMemory:
    """The highest moment of a segment, or of the optimizer's update."""

    phase: str
    live: Mapping[str, int]
    """Bytes of each live value, by the name of its storage owner."""


@dataclass
class StepMemory:
    """The predicted memory of a step."""

    input_bytes: int
    """Bytes of parameters, buffers and inputs."""
    state_bytes: int
    """Bytes of optimizer states."""
    saved: frozenset[str] = frozenset()
    """Names of the values that are saved for the backward."""
    gradients: frozenset[str] = frozenset()
    peak: Moment = field(default_factory=lambda: Moment({}, 0))
    """The moment at which the values that come and go take most memory."""
    stages: list[StageMemory] = field(default_factory=list)
    """The segments in the order of execution, and last the optimizer's update."""
    original: dict[str, str] = field(default_factory=dict)
    """The original value of each offloaded, prefetched or packed one, by name."""
    overhead_ms: float = 0.0
    """Milliseconds that offload and packed masks add to a step, by the cost model."""

    @property
    def resident_bytes(self) -> int:
        """Bytes that are live during the whole step."""
        return self.input_bytes + self.state_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are live during the step."""
        return self.resident_bytes + self.peak.bytes


def predict_step(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_outputs: int,
    cutter: Cutter,
    states: OptimizerStates,
    steps_early: bool = False,
) -> StepMemory:
    """Predict the memory of a step of these graphs, which are changed.

    The caller keeps the first `num_outputs` outputs of the forward; the others are saved for the backward. With
    `steps_early` the optimizer consumes gradients as soon as the segment that computes them has run.
    """
    inputs = forward.graph.find_nodes(op="placeholder")
    trained = [node for node, gradient in zip(inputs, returned(backward.graph), strict=False) if gradient is not None]
    early = gradient_sources(forward, backward, num_outputs) if steps_early else ()
    memory = LiveMemory()
    step = StepMemory(sum(map(output_bytes, inputs)), states(sum(map(output_bytes, trained))))
    step.stages += _PassSimulation(forward, {}, set()).stages("forward", memory, cutter(forward, ()))
    results = returned(forward.graph)
    owners = {node.name: storage_owner(node).name for node in results if isinstance(node, fx.Node)}
    outputs = {owners[node.name] for node in results[:num_outputs] if isinstance(node, fx.Node)}
    step.saved = frozenset(owners[node.name] for node in results[num_outputs:] if isinstance(node, fx.Node)) - outputs
    step.original = _offloaded_originals(results, backward.graph) | _packed_originals(results)
    known = {node.name for node in inputs}.union(owners)
    for tangent in backward.graph.find_nodes(op="placeholder"):
        if is_tensor(tangent) and tangent.name not in known:
            memory.add(tangent.name, output_bytes(tangent))
    simulation = _PassSimulation(backward, owners, outputs, early)
    step.stages += simulation.stages("backward", memory, cutter(backward, early))
    gradients = (node for node in returned(backward.graph) if isinstance(node, fx.Node))
    step.gradients = frozenset(map(simulation.storage, gradients))
    memory.add(WORKSPACE, UPDATE_TEMPORARIES * max(map(output_bytes, trained), default=0))
    step.stages.append(StageMemory("optimizer", memory.live))
    step.peak = memory.peak
    return step


def _offloaded_originals(results: Iterable[Argument], backward: fx.Graph) -> dict[str, str]:
    """Returns the offloaded values by their own names and by the names of their prefetched copies."""
    on_host = [node for node in results if isinstance(node, fx.Node) and is_on_host(node)]
    originals = {node.name: storage_owner(node.all_input_nodes[0]).name for node in on_host}
    prefetched = backward.find_nodes(op="call_function", target=own.from_host.default)
    copies = {node.name: originals[node.all_input_nodes[0].name] for node in prefetched}
    return {name: name for name in originals.values()} | copies


def _packed_originals(results: Iterable[Argument]) -> dict[str, str]:
    """Returns the masks by the names of their packed bits."""
    packed = [node for node in results if isinstance(node, fx.Node) and node.target is bits.to_bits.default]
    return {node.name: storage_owner(node.all_input_nodes[0]).name for node in packed}


class _PassSimulation:
    """Simulates the allocations of the forward or the backward of a step."""

    def __init__(
        self,
        module: fx.GraphModule,
        owners: Mapping[str, str],
        outputs: Collection[str],
        early: Gradients = (),
    ) -> None:
        """`owners` names the storage owner of each input. The caller keeps `outputs`. Outputs with an early gradient
        are freed after the segment that computes them."""
        self._owners = owners
        results = returned(module.graph)
        freed = [node for node, source in zip(results, early, strict=False) if source is not None]
        self._freed_early = {self.storage(node) for node in freed if isinstance(node, fx.Node)}
        self._kept = {self.storage(node) for node in results if isinstance(node, fx.Node)} - self._freed_early
        self._kept |= set(outputs)
        self._last_reader: dict[str, Cut] = {}
        self._overwritable: set[str] = set()

    def storage(self, node: fx.Node) -> str:
        """Returns the name of the value that owns a node's storage."""
        name = storage_owner(node).name
        return self._owners.get(name, name)

    def stages(self, phase: str, memory: LiveMemory, cuts: list[Cut]) -> Iterator[StageMemory]:
        """Yields the highest moment of each segment, and updates the memory meanwhile."""
        computed = {item.name: cut for cut in cuts for node in cut.nodes for item in _allocated(node)}
        self._overwritable = {node.name for cut in cuts for node in cut.nodes if is_reusable(node, cut.runner)}
        self._last_reader = {name: computed[name] for name in self._freed_early if name in computed}
        self._last_reader |= {
            self.storage(item): cut for cut in cuts for node in cut.nodes for item in tensor_inputs(node)
        }
        memory.drop([name for name in memory if self._is_dead(name)])
        intervals, position = self._liveness(cuts), count()
        for cut in cuts:
            reader = {self.storage(item): node for node in cut.nodes for item in tensor_inputs(node)}
            inputs = self._held_inputs(phase, cut, memory)
            highest, most = StageMemory(phase, memory.live), memory.bytes
            for node in cut.nodes:
                memory.is_used = partial(_is_live_at, intervals, next(position))
                read = dict.fromkeys(map(self.storage, tensor_inputs(node)))
                dead = [name for name in read if self._dies_in(name, cut) and name not in inputs]
                dead = [name for name in dead if reader[name] is node]
                workspace = self._run(node, cut, dead, memory)
                if memory.bytes > most:
                    highest, most = StageMemory(phase, memory.live), memory.bytes
                unread = [item.name for item in _allocated(node) if self._is_dead(item.name)]
                memory.drop([*workspace, *dead, *unread])
            memory.drop([name for name in inputs | self._freed_early if self._dies_in(name, cut)])
            yield highest
        memory.is_used = Moment.is_used

    def _held_inputs(self, phase: str, cut: Cut, memory: LiveMemory) -> set[str]:
        """Returns the inputs that a segment holds until it ends."""
        if cut.runner is Runner.PYTORCH:
            return set()
        if phase == "forward":
            return set(memory)
        readers = (node for node in cut.nodes if node not in cut.called)
        return {self.storage(item) for node in readers for item in tensor_inputs(node)}.intersection(memory)

    def _liveness(self, cuts: Iterable[Cut]) -> dict[str, tuple[int, int]]:
        """Returns the positions of the first and the last operator that computes or reads each value."""
        found: dict[str, tuple[int, int]] = {}
        for position, node in enumerate(node for cut in cuts for node in cut.nodes):
            values = [] if is_view(node) or is_getitem(node) else [*_allocated(node), *tensor_inputs(node)]
            found |= {name: (found.get(name, (position,))[0], position) for name in map(self.storage, values)}
        return found

    def _is_dead(self, name: str) -> bool:
        """True if no segment reads a value and nobody keeps it."""
        return name not in self._kept and name not in self._last_reader

    def _dies_in(self, name: str, cut: Cut) -> bool:
        """True if a segment is the last that reads a value."""
        return name not in self._kept and self._last_reader.get(name) is cut

    def _is_internal(self, name: str, cut: Cut) -> bool:
        """True if a value is computed by a segment and dies in it."""
        return self._dies_in(name, cut) and name not in self._freed_early

    def _run(self, node: fx.Node, cut: Cut, dead: Collection[str], memory: LiveMemory) -> list[str]:
        """Allocate the results and the workspace of an operator, and return the names of the workspace.

        The operator is the last reader of the `dead` values.
        """
        before, beside = workspace_bytes(node, Runner.PYTORCH if node in cut.called else cut.runner)
        if node in cut.copied:
            beside = [*beside, output_bytes(node)]
        sizes = {f"{WORKSPACE} {number}": size for number, size in enumerate([*before, *beside])}
        for name, size in sizes.items():
            memory.add(name, size)
        memory.drop([*sizes][: len(before)])
        workspace = [*sizes][len(before) :]
        if (operand := self._overwritten(node, cut, dead, memory)) is not None:
            memory.replace(operand, node.name)
            return workspace
        for item in _allocated(node):
            memory.add(item.name, output_bytes(item))
        return workspace

    def _overwritten(self, node: fx.Node, cut: Cut, dead: Collection[str], memory: LiveMemory) -> str | None:
        """Returns the dead operand that an operator overwrites with its result, if it does."""
        if node in cut.called:
            return None
        if cut.runner is Runner.PYTORCH:
            names = (self.storage(operand) for operand in replaceable(node))
            return next((name for name in names if name in dead and name in self._overwritable), None)
        if not facts(node).ort_reuses_input or not self._is_internal(node.name, cut):
            return None
        return next((name for name in dead if memory.size(name) == output_bytes(node)), None)


def workspace_bytes(node: fx.Node, runner: Runner) -> tuple[list[int], list[int]]:
    """Returns the bytes of each temporary that an operator frees before its result exists, and after that."""
    known = facts(node)
    if runner is Runner.ORT:
        before, beside = known.ort_workspace
        return [output_bytes(node)] * before, [output_bytes(node)] * beside
    size = known.pytorch_workspace(node) if known.pytorch_workspace else 0
    return [], [size] if size else []


def _is_live_at(intervals: Mapping[str, tuple[int, int]], position: int, name: str) -> bool:
    """True if the operator at a position lies in the liveness interval of a value."""
    first, last = intervals.get(name, (0, -1))
    return first <= position <= last


def _allocated(node: fx.Node) -> list[fx.Node]:
    """Returns the values that a node computes into storage of their own, on the device."""
    owns_nothing = is_view(node) or is_getitem(node) or writes(node) or is_on_host(node)
    return [] if owns_nothing else output_nodes_of(node)
