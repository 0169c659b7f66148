"""Lets PyTorch's Inductor write the C++ of a cluster, or Python and C++ of a whole graph.

It uses what is private to torch: `GraphLowering`, `compile_fx_inner`, the text that Inductor's Python wrapper consists
of, `cpp_builder` and `pick_vec_isa`. Checked with torch 2.13 and 2.14. The wrapper of a cluster is run once with
stand-ins for its functions, which record the kernels that it would launch, in order, and the buffers that it would
allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions, get_cpp_compiler
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.reinplace import inplaceable_ops
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import CppPrinter, PythonPrinter

from ort_accel.generated.description import KERNELS, Description, Layout, checked_name, kernel_name

Size: TypeAlias = int | sympy.Expr

SETTINGS = {
    "cpp.dynamic_threads": True,  # as many as PyTorch has when the kernel runs
    "cpp.enable_kernel_profile": False,
    "cpp_wrapper": False,
    "fallback_random": True,  # numbers are drawn as PyTorch's operators draw them
    "fx_graph_cache": False,
    "graph_partition": False,
    "size_asserts": False,
}

ROUNDING = "emulate_precision_casts"
"""The setting that rounds intermediate results in 16 bits, as PyTorch's operators do. Kernels without it are faster."""

ALIGNMENT_BYTES = 64

aten = torch.ops.aten

INDEXING = frozenset(
    getattr(packet, name)
    for packet in (
        aten.embedding,
        aten.embedding_dense_backward,
        aten.gather,
        aten.index,
        aten.index_add,
        aten.index_copy,
        aten.index_put,
        aten.index_select,
        aten.nll_loss_backward,
        aten.nll_loss_forward,
        aten.scatter,
        aten.scatter_add,
        aten.scatter_reduce,
        aten.take,
    )
    for name in packet.overloads()  # type: ignore[no-untyped-call]
)
"""Operators that read or write where a tensor of positions says. In a program, PyTorch computes them and checks the
positions. A kernel of Inductor checks them in its threads, where an error ends the process."""


class CannotGenerate(Exception):
    """Raised if Inductor writes something for a cluster that is not only kernels in C++."""


@dataclass(frozen=True)
class Source:
    """The code of a cluster or a graph."""

    text: str
    """C++: for a cluster, a function with its name; for a graph, all its kernels."""
    conditions: list[str]
    """Conditions on the symbols, in Python, under which it holds."""
    wrapper: str = ""
    """For a graph, the Python module that calls the kernels."""


def write_source(name: str, described: Description, hints: Mapping[str, int]) -> Source:
    """Returns the C++ of a cluster."""
    traced = _Traced(described, hints)
    graph = GraphLowering(traced.module, example_inputs=traced.arguments, shape_env=traced.env)
    with (
        DebugContext(),
        V.set_fake_mode(traced.mode),
        V.set_graph_handler(graph),
        inductor_config.patch(traced.settings),
    ):
        graph.run(*traced.arguments)
        wrapper, *_ = graph.codegen()
    recorded = _Recorder(wrapper.value, len(traced.arguments) - len(hints), hints).source(name, described.outputs)
    return Source(recorded, traced.conditions())


def write_program(name: str, described: Description, hints: Mapping[str, int]) -> Source:
    """Returns the Python and the C++ of a whole graph, which calls PyTorch's operators, too."""
    traced = _Traced(described, hints)
    kernels: list[str] = []

    def kernel(_: object, types: Sequence[str], source: str, *__: object, **___: object) -> None:
        own = kernel_name(name, len(kernels))
        parameters = ", ".join(f"{kind} a{at}" for at, kind in enumerate(types))
        arguments = ", ".join(f"a{at}" for at in range(len(types)))
        checked = CHECKED.format(name=checked_name(own), kernel=own, parameters=parameters, arguments=arguments)
        kernels.append(_renamed(source, own) + checked)

    with (
        inductor_config.patch(traced.settings),
        patch.dict(inplaceable_ops, clear=True),  # memory that an operator writes into would be used again too early
        patch.dict(lowerings, {operator: fallback_handler(operator, False) for operator in INDEXING}),  # type: ignore[no-untyped-call]
        tracing(TracingContext(traced.mode)),
        patch.object(AsyncCompile, "cpp_pybinding", kernel),
        patch.object(AsyncCompile, "wait", lambda *_: None),
    ):
        compiled: Any = compile_fx_inner(traced.module, traced.arguments)
    if compiled.constants:
        raise CannotGenerate("a program with constants of its own")
    if any("TORCH_CHECK" in kernel for kernel in kernels):
        raise CannotGenerate("a kernel that checks its data")
    wrapper = compiled.source_code.replace("AsyncCompile()", KERNELS)
    return Source("".join(kernels), traced.conditions(), wrapper)


def _renamed(source: str, name: str) -> str:
    if source.count(" kernel(") != 1:
        raise CannotGenerate("a kernel of another form")
    return source.replace(" kernel(", f" {name}(")


class _Traced:
    """The operators of a description, traced with symbolic sizes into those that Inductor compiles."""

    def __init__(self, described: Description, hints: Mapping[str, int]) -> None:
        self.env = ShapeEnv()
        symbols = [_symbol(self.env, symbol, hint) for symbol, hint in hints.items()]
        results = described.outputs(*symbols)
        shows_rounding = any(each.dtype not in (torch.bfloat16, torch.float16) for each in results)
        self.settings = SETTINGS | {ROUNDING: shows_rounding}
        with FakeTensorMode(shape_env=self.env) as self.mode, inductor_config.patch(self.settings):
            layouts = described.inputs(*symbols)
            given = [torch.empty_strided(each.shape, each.strides, dtype=each.dtype) for each in layouts]
            self.arguments: list[Any] = [*symbols, *given]
            table = {operator: each for operator, each in select_decomp_table().items() if operator not in INDEXING}
            self.module = make_fx(described.run, decomposition_table=table)(*self.arguments)
        output = self.module.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(results)))
        output.meta["original_output_strides"] = [tuple(each.strides) for each in results]
        self._names = {symbol.node.expr: sympy.Symbol(text) for symbol, text in zip(symbols, hints, strict=True)}

    def conditions(self) -> list[str]:
        """Returns the conditions on the symbols that tracing and compiling have relied on, in Python."""
        printer = PythonPrinter()
        return [printer.doprint(guard.expr.xreplace(self._names)) for guard in self.env.guards]


def check_compiler() -> None:
    """Raise an error if there is no C++ compiler that runs."""
    get_cpp_compiler()


def compile_library(source: Path) -> Path:
    """Returns the library that the system's C++ compiler makes of a file, with the flags of Inductor's kernels."""
    options = CppTorchOptions(vec_isa=pick_vec_isa(), warning_all=False)
    builder = CppBuilder(name=source.stem, sources=str(source), output_dir=str(source.parent), BuildOption=options)
    builder.build()
    return Path(builder.get_target_file_path())


def _symbol(env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    found = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(found, torch.SymInt)
    return found


@dataclass
class _Buffer:
    """Memory that the wrapper allocates or is given, or a view of it."""

    name: str
    layout: Layout
    base: _Buffer | None = None
    offset: Size = 0

    def address(self, number: Callable[[Any], str]) -> str:
        """Returns the C++ of the address of its first element."""
        base = self.base or self
        kind = _c_type(self.layout.dtype)
        moved = (
            base.name if self.base is None else f"({_c_type(base.layout.dtype)}*)({base.name}) + {number(self.offset)}"
        )
        return f"({kind}*)({moved})"


@dataclass(frozen=True)
class _Launch:
    """A call of a kernel with buffers and numbers."""

    kernel: str
    values: Sequence[Any]


class _Recorder:
    """Runs Inductor's Python wrapper with stand-ins, and writes what it does as C++."""

    def __init__(self, text: str, inputs: int, hints: Mapping[str, int]) -> None:
        self._text, self._inputs, self._hints = text, inputs, hints
        self._kernels: list[str] = []
        self._launches: list[_Launch] = []
        self._buffers: list[_Buffer] = []
        printer = CppPrinter()
        self._number: Callable[[Any], str] = lambda value: f"(int64_t)({printer.doprint(sympy.sympify(value))})"

    def source(self, name: str, outputs: Callable[..., Sequence[Layout]]) -> str:
        """Returns the C++ of a function under a name. Its arguments are the inputs, outputs and symbols."""
        symbols = [sympy.Symbol(symbol, integer=True, positive=True) for symbol in self._hints]
        given = [_Buffer(f"a[{at}].pointer", Layout(torch.uint8, (), ())) for at in range(self._inputs)]
        results = self._run(name, [*symbols, *given])
        self._place_results(results, outputs(*symbols))
        scratch = [buffer for buffer in self._buffers if buffer.name.startswith("scratch")]
        lines = [
            *(
                f"const int64_t {symbol} = a[{self._inputs + len(results) + at}].integer;"
                for at, symbol in enumerate(symbols)
            ),
            *(f"const Scratch {each.name}({self._bytes(each.layout)});" for each in scratch),
            *map(self._call, self._launches),
        ]
        body = "\n".join(f"  {line}" for line in lines)
        return "\n".join([*self._kernels, FUNCTION.format(name=name, body=body)])

    def _run(self, name: str, arguments: list[Any]) -> Sequence[_Buffer]:
        """Runs the wrapper. Returns its results."""

        def kernel(_: object, __: object, source: str, *___: object, **____: object) -> Callable[..., None]:
            own = kernel_name(name, len(self._kernels))
            self._kernels.append(_renamed(source, own))
            return lambda *values: self._launches.append(_Launch(own, values))

        functions: dict[str, Any] = {"__name__": name}
        with patch.object(AsyncCompile, "cpp_pybinding", kernel), patch.object(AsyncCompile, "wait", lambda *_: None):
            exec(self._text, functions)
        functions |= {
            "empty_strided_cpu": self._allocate,
            "assert_size_stride": lambda *_: None,
            "reinterpret_tensor": self._view,
        }
        try:
            return tuple(functions["call"](arguments))
        except (AttributeError, NameError, RuntimeError, TypeError) as error:  # a stand-in cannot do what is asked
            raise CannotGenerate(f"Inductor calls more than kernels: {error}") from error

    def _allocate(self, shape: Sequence[Any], strides: Sequence[Any], dtype: torch.dtype) -> _Buffer:
        buffer = _Buffer(f"scratch{len(self._buffers)}", Layout(dtype, tuple(shape), tuple(strides)))
        self._buffers.append(buffer)
        return buffer

    def _view(self, source: _Buffer, shape: Sequence[Any], strides: Sequence[Any], offset: Any = 0) -> _Buffer:
        layout = Layout(source.layout.dtype, tuple(shape), tuple(strides))
        return _Buffer("", layout, source.base or source, source.offset + offset)

    def _place_results(self, results: Sequence[_Buffer], wanted: Sequence[Layout]) -> None:
        """Lets the buffers that the wrapper returns be the function's outputs."""
        seen: list[_Buffer] = []
        for at, (result, layout) in enumerate(zip(results, wanted, strict=True)):
            base = result.base or result if isinstance(result, _Buffer) else None
            if base is None or base not in self._buffers or any(base is other for other in seen):
                raise CannotGenerate("a result is not memory of its own")
            if result.offset != 0 or result.layout.dtype != layout.dtype or not _same_layout(result.layout, layout):
                raise CannotGenerate("a result lies in memory in another order")
            base.name = f"a[{self._inputs + at}].pointer"
            seen.append(base)

    def _call(self, launch: _Launch) -> str:
        values = [
            each.address(self._number) if isinstance(each, _Buffer) else self._number(each) for each in launch.values
        ]
        return f"call({launch.kernel}, {', '.join(values)});"

    def _bytes(self, layout: Layout) -> str:
        last = sum(((size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True)), 0)
        return self._number((last + 1) * layout.dtype.itemsize)


def _same_layout(one: Layout, other: Layout) -> bool:
    """True if tensors lie alike in memory. Strides of dimensions with one entry do not matter."""
    if len(one.shape) != len(other.shape):
        return False
    return all(
        sympy.simplify(size - wanted) == 0 and (size == 1 or sympy.simplify(stride - expected) == 0)
        for size, wanted, stride, expected in zip(one.shape, other.shape, one.strides, other.strides, strict=True)
    )


def _c_type(dtype: torch.dtype) -> str:
    name: str = DTYPE_TO_CPP[dtype]
    return name


FUNCTION = """extern "C" int64_t {name}(const Value* a) try {{
{body}
  return 0;
}} catch (...) {{
  return 1;
}}
"""
"""The function of a cluster. An exception, such as a division of integers by zero, becomes its result."""

CHECKED = """extern "C" const char* {name}({parameters}) try {{
  {kernel}({arguments});
  return nullptr;
}} catch (const std::exception& error) {{
  static thread_local std::string text;
  text = error.what();
  return text.c_str();
}}
"""
"""The function by which a program calls a kernel. It returns the text of an exception: an index may be out of range."""

PREAMBLE = f"""
#include <torch/csrc/inductor/cpp_prefix.h>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>

union Value {{
  int64_t integer;
  double real;
  void* pointer;
}};

/// Memory of the length of a call.
struct Scratch {{
  explicit Scratch(int64_t bytes)
      : data(std::aligned_alloc({ALIGNMENT_BYTES}, (bytes / {ALIGNMENT_BYTES} + 1) * {ALIGNMENT_BYTES})) {{
    if (!data && bytes > 0) throw std::bad_alloc();
  }}
  ~Scratch() {{ std::free(data); }}
  template <typename T>
  explicit operator T*() const {{ return static_cast<T*>(data); }}
  void* data;
}};

/// Calls a kernel, whose parameters differ from the given ones in constness only.
template <typename... Parameters, typename... Arguments>
void call(void (*kernel)(Parameters...), Arguments... arguments) {{
  kernel(Parameters(arguments)...);
}}
"""
"""The beginning of a file of clusters."""
