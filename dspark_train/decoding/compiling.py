"""Work of fixed shapes, compiled: traced once, cut where layers begin, every different piece once.

A pass over few tokens spends half its time between its products: a norm alone is seven operations,
and each is launched by itself. torch's inductor makes a few kernels of them. The layers of a model
are the same piece many times, so that compiling a shape takes seconds.
"""

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.passes.split_module import split_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

PIECE = "piece"
_BORDER: ContextVar[Callable[[], None] | None] = ContextVar("border", default=None)
# compiled pieces by what they do, and to tensors of which shape; they hold no weights
_COMPILED: dict[str, Callable[..., Any]] = {}
# make_fx changes torch for as long as it traces
_TRACING = threading.RLock()

aten = torch.ops.aten
HOST_METHODS = (torch.Tensor.tolist, torch.Tensor.numpy)
HOST_READS = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.lift_fresh.default,
    aten.masked_select.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
)
BY_MASK = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class HostReadError(RuntimeError):
    """Work read a value on the host, or made a tensor of one: it could not be repeated."""


class NoHostReads(TorchDispatchMode):
    """Within, work is refused that could not be repeated without its Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = args[1] if func in BY_MASK else ()
        if func in HOST_READS or any(i is not None and i.dtype == torch.bool for i in places):
            raise HostReadError(f"{func} within recorded work")
        return func(*args, **(kwargs or {}))


class NoHostMethods(TorchFunctionMode):
    """The same for methods that torch does not dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_METHODS:
            raise HostReadError(f"{func.__name__} within recorded work")
        return func(*args, **(kwargs or {}))


def cut() -> None:
    """A new piece begins here, if work is being traced: what is done again and again is one."""
    if (border := _BORDER.get()) is not None:
        border()


def compiled(work: Callable[[], Any], layers: Sequence[nn.Module]) -> Callable[[], Any]:
    """`work`, which is run once here to trace it, without its Python from then on.

    Args:
        work: reads what changes from tensors that it owns, and no value on the host.
        layers: modules that it calls one after the other.

    Raises:
        ValueError: it reads values on the host, or inductor cannot compile it here; says why.
    """
    try:
        with _TRACING:
            module = _trace(work, layers)
            held = _lift(module)
            whole = split_module(module, None, lambda node: node.meta[PIECE])
            _Compiler(whole).run(*held)
    except Exception as error:  # a model's own way, a missing compiler, or any part of inductor
        reason = next(iter(str(error).strip().splitlines()), "")
        raise ValueError(
            f"this model cannot be compiled here ({type(error).__name__}: {reason}): take "
            "target.compile=false, or install a C++ compiler if that is what is missing"
        ) from error
    return lambda: whole(*held)


def _trace(work: Callable[[], Any], layers: Sequence[nn.Module]) -> fx.GraphModule:
    """The operations of `work`, each with the number of its piece."""
    pieces, own = 0, None

    def border(*_: Any) -> None:
        nonlocal pieces
        if own is None or get_proxy_mode() is not own:  # another thread's pass
            return
        _number(own.tracer.graph, pieces)
        pieces += 1

    def watched() -> Any:
        nonlocal own
        own = get_proxy_mode()
        token = _BORDER.set(border)
        try:
            with NoHostReads(), NoHostMethods():
                return work()
        finally:
            _BORDER.reset(token)

    hooks = [layer.register_forward_pre_hook(border) for layer in layers]
    hooks += [layer.register_forward_hook(border) for layer in layers[-1:]]
    try:
        module = make_fx(watched)()
    finally:
        for hook in hooks:
            hook.remove()
    _number(module.graph, pieces)
    return module


def _number(graph: fx.Graph, piece: int) -> None:
    for node in reversed(graph.nodes):
        if PIECE in node.meta:
            break
        node.meta[PIECE] = piece


def _lift(module: fx.GraphModule) -> list[torch.Tensor]:
    """Make arguments of all tensors that the graph holds; returns them."""
    graph = module.graph
    holding = [node for node in graph.nodes if node.op == "get_attr"]
    names = list(dict.fromkeys(node.target for node in holding))
    places = {}
    for name in reversed(names):
        with graph.inserting_before(None):  # before the first of all
            places[name] = graph.placeholder(name)
    for node in holding:
        node.replace_all_uses_with(places[node.target])
        graph.erase_node(node)
    module.recompile()
    return [getattr(module, name) for name in names]


class _Compiler(fx.Interpreter):
    """Runs the pieces of a module, and puts a compiled one in the place of each."""

    def call_module(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        piece = getattr(self.module, target)
        key = _signature(piece, args)
        if key not in _COMPILED:
            _COMPILED[key] = _compile(piece, args)
        delattr(self.module, target)
        setattr(self.module, target, _COMPILED[key])
        return _COMPILED[key](*args)


def _compile(piece: fx.GraphModule, args: tuple[Any, ...]) -> Callable[..., Any]:
    # importing it takes seconds, which only those who compile should wait for
    from torch import _inductor

    return _inductor.compile(piece, list(args))


def _signature(piece: fx.GraphModule, args: tuple[Any, ...]) -> str:
    """What a piece does, whatever its nodes are called."""
    numbers = {node: f"%{i}" for i, node in enumerate(piece.graph.nodes)}
    done = [
        (
            node.op,
            str(node.target) if node.op == "call_function" else "",
            fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__),
        )
        for node in piece.graph.nodes
    ]
    shapes = [(x.shape, x.stride(), x.dtype, x.device) for x in args]
    return repr((done, shapes, torch.get_num_threads()))
