"""Compiled draft and verify passes of one verifier (``runtime.compile=true``).

``models.compiled_stack`` says what a pass computes; this module decides the shapes, compiles one graph for each and
keeps the caches they write into. A shape is a number of nodes and a cache capacity, both rounded up to a bucket. On a
CPU inductor freezes the weights into the graph and packs them (each graph has packed weights of its own: memory grows
with the number of buckets); on CUDA each graph is recorded as a CUDA graph, which wants its inputs where they were, so
caches go back to a pool and are used again.

Weights are those at the time of compilation. A graph takes about a minute to compile for a model of 30 layers; what
will be needed is best compiled beforehand (``warm``), since a shape met for the first time is compiled on the spot.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specdiff2.models.compiled_stack import DraftPass, VerifyPass, check_compilable
from specdiff2.models.kv_cache import PreallocatedCache
from specdiff2.models.transfer import to_device
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError

if TYPE_CHECKING:
    from specdiff2.models.block_drafter import BlockDrafter
    from specdiff2.models.verifier import HFVerifier

log = logging.getLogger(__name__)
NODE_BUCKETS = (1, 9, 17, 33, 49, 65, 97, 129)  # the root, and drafted nodes in round numbers
CAPACITIES = (128, 256, 512, 768)  # then multiples of 512
NUM_CUDA_RUNS = 3  # warm-up, recording, and one replay


class CompiledPasses:
    """See the module docstring. ``backend``: of ``torch.compile``; another than inductor serves tests.

    Raises:
        ConfigError: a model that cannot be compiled with fixed shapes, or no C++ compiler on a CPU.
    """

    def __init__(self, verifier: HFVerifier, *, backend: str = "inductor") -> None:
        check_compilable(verifier.config)
        self._on_cuda = verifier.device.type == "cuda"
        self._compiler = None if self._on_cuda or backend != "inductor" else find_compiler()
        self._verifier = verifier
        self._backend = backend
        self._node_buckets: tuple[int, ...] = ()
        self._capacities: tuple[int, ...] = ()
        self._verify: dict[tuple[int, int, bool], Callable[..., Any]] = {}
        self._draft: WeakKeyDictionary[BlockDrafter, dict[int, Callable[..., Any]]] = WeakKeyDictionary()
        self._free: list[PreallocatedCache] = []

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far."""
        return len(self._verify) + sum(len(graphs) for graphs in self._draft.values())

    def nodes_bucket(self, num_nodes: int) -> int:
        """Nodes of the graph that scores a tree of ``num_nodes``: the next warmed number, else the next usual one."""
        multiple = -(-(num_nodes - 1) // 64) * 64 + 1
        return min((n for n in (self._node_buckets or NODE_BUCKETS) if n >= num_nodes), default=multiple)

    def capacity(self, length: int) -> int:
        """Slots of the cache for a text of up to ``length`` tokens, tree included."""
        multiple = -(-length // 512) * 512
        return min(n for n in (*self._capacities, *CAPACITIES, multiple) if n >= length)

    def lease(self, owner: object, length: int) -> PreallocatedCache:
        """An empty cache for at least ``length`` tokens; it goes back to the pool when ``owner`` is gone."""
        capacity = self.capacity(length)
        cache = next((cache for cache in self._free if cache.capacity == capacity), None)
        if cache is None:
            verifier = self._verifier
            cache = PreallocatedCache.allocate(
                verifier.config, 1, capacity, verifier.dtype, verifier.device, self.capacity
            )
        else:
            self._free.remove(cache)
            cache.clear()
        finalize(owner, self._free.append, cache).atexit = False
        return cache

    @torch.inference_mode()
    def verify(
        self, tree: TokenTree, num_cached: int, cache: PreallocatedCache
    ) -> tuple[Float[Tensor, "node vocab"], tuple[Tensor, ...] | None]:
        """Logits after each node, and the hidden states by layer where the verifier keeps them.

        The nodes' keys and values stand behind the ``num_cached`` cached tokens afterwards.
        """
        bucket = self.nodes_bucket(tree.num_nodes)
        cache.reserve(num_cached + bucket)
        padding = [0] * (bucket - tree.num_nodes)
        numbers = [*tree.tokens, *padding, *tree.parents, *padding, num_cached]
        logits, hidden = self._run_verify(bucket, cache, numbers)
        cache.filled(num_cached + tree.num_nodes)
        return logits[: tree.num_nodes], hidden or None

    def can_draft(self, drafter: BlockDrafter) -> bool:
        """Whether this drafter has a compiled pass: conditioned, one denoising step, in the verifier's dtype."""
        return (
            drafter.context is not None
            and drafter.config.denoising_steps == 1
            and drafter.dtype == self._verifier.dtype
            and drafter.stack.config.model_type == self._verifier.config.model_type
        )

    @torch.inference_mode()
    def draft(
        self, drafter: BlockDrafter, token: int, gamma: int, features: Tensor, num_cached: int, cache: PreallocatedCache
    ) -> tuple[Float[Tensor, "gamma hidden"], Float[Tensor, "gamma draft_vocab"]]:
        """States and logits of the first ``gamma`` columns after ``token``; the window leaves no trace in the cache."""
        cache.reserve(num_cached + drafter.gamma)
        states, logits = self._run_draft(drafter, cache, [token, gamma, num_cached], features)
        return states[:gamma], logits[:gamma]

    @torch.inference_mode()
    def warm(self, node_counts: Collection[int], length: int, drafters: Sequence[BlockDrafter] = ()) -> None:
        """Compile everything for trees of these sizes (each a bucket of its own from now on), texts of up to ``length``
        tokens, and these drafters. Sizes and lengths of earlier calls stay."""
        self._node_buckets = tuple(sorted({1, *self._node_buckets, *node_counts}))
        self._capacities = tuple(sorted({*self._capacities, self.capacity(length)}))
        owner = _Owner()
        cache = self.lease(owner, length)
        for num_nodes in self._node_buckets:
            if (num_nodes, cache.capacity, self._verifier.output_features) not in self._verify:
                self._run_verify(num_nodes, cache, [0] * (2 * num_nodes + 1))
        for drafter in drafters:
            if self.can_draft(drafter) and cache.capacity not in self._draft.get(drafter, {}):
                assert drafter.context is not None
                shape = drafter.context.shape
                width = len(shape.feature_layers) * shape.hidden_size
                self._run_draft(
                    drafter, cache, [0, 1, 0], torch.zeros(width, dtype=drafter.dtype, device=drafter.device)
                )

    def _run_verify(self, num_nodes: int, cache: PreallocatedCache, numbers: list[int]) -> Any:
        key = (num_nodes, cache.capacity, self._verifier.output_features)
        arguments = (to_device(numbers, self._verifier.device), *self._slots(cache))
        if key not in self._verify:
            graph = self._graph(VerifyPass(self._verifier, num_nodes, key[2]))
            name = f"verifier pass, {num_nodes} node{'s' if num_nodes > 1 else ''}, {cache.capacity} cache slots"
            self._first_run(name, graph, arguments)
            self._verify[key] = graph
        return self._call(self._verify[key], arguments)

    def _run_draft(self, drafter: BlockDrafter, cache: PreallocatedCache, numbers: list[int], features: Tensor) -> Any:
        assert drafter.context is not None  # conditioned
        graphs = self._draft.setdefault(drafter, {})
        slots = self._slots(cache, drafter.context.shape.layer_indices)
        arguments = (to_device(numbers, self._verifier.device), features, *slots)
        if cache.capacity not in graphs:
            graph = self._graph(DraftPass(drafter, self._verifier))
            self._first_run(f"draft pass, {drafter.gamma} columns, {cache.capacity} cache slots", graph, arguments)
            graphs[cache.capacity] = graph
        return self._call(graphs[cache.capacity], arguments)

    def _slots(
        self, cache: PreallocatedCache, layers: Sequence[int] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        keys, values = cache.slots(layers)
        # a CUDA graph writes where it was recorded; it is recorded again for another cache
        if self._on_cuda and not hasattr(keys[0], "_dynamo_static_input_type"):
            for slots in (*keys, *values):
                torch._dynamo.mark_static_address(slots, guard=False)  # type: ignore[attr-defined]
        return keys, values

    def _graph(self, computed: nn.Module) -> Callable[..., Any]:
        """``computed``, to be compiled at its first call."""

        def run(*arguments: Any) -> Any:
            return computed(*arguments)

        # dynamo keeps its graphs, and its limit of eight, by code object: each pass gets one of its own
        own = types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)
        mode = "reduce-overhead" if self._on_cuda and self._backend == "inductor" else None
        return torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend, mode=mode)

    def _first_run(self, name: str, graph: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        log.info("compiling: %s (the first time about a minute for a model of 30 layers)", name)
        with self._settings(), _clear_errors(name):
            for _ in range(NUM_CUDA_RUNS if self._on_cuda else 1):
                self._call(graph, arguments)

    def _call(self, graph: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not self._on_cuda:
            return graph(*arguments)
        torch.compiler.cudagraph_mark_step_begin()
        return torch.utils._pytree.tree_map(torch.clone, graph(*arguments))  # the next replay overwrites its outputs

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        """Frozen weights on a CPU: dynamo reads the global setting, so an option of ``torch.compile`` is not enough."""
        if self._compiler is None:
            yield
            return
        import torch._inductor.config as inductor

        with inductor.patch({"freezing": True, "cpp.cxx": (None, self._compiler)}):
            yield


class _Owner:
    """Holds a cache of the pool for the time of a warm-up."""


def find_compiler() -> str:
    """The C++ compiler inductor will use: ``$CXX``, else g++, c++ or clang++.

    Raises:
        ConfigError: there is none.
    """
    chosen = os.environ.get("CXX")
    for name in [chosen] if chosen else ["g++", "c++", "clang++"]:
        if shutil.which(name):
            return name
    raise ConfigError(
        f"runtime.compile=true needs a C++ compiler: found none (CXX={chosen!r}, looked for "
        f"{chosen or 'g++, c++, clang++'}); install one (apt install g++), or set runtime.compile=false: it needs none"
    )


@contextlib.contextmanager
def _clear_errors(name: str) -> Iterator[None]:
    """Raises ConfigError where the C++ compiler of this machine fails; everything else is a bug here."""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        yield
    except Exception as error:
        cause: BaseException | None = getattr(error, "inner_exception", error)
        if not isinstance(cause, CppCompileError | InvalidCxxCompiler):
            raise
        last = str(cause).strip().splitlines()[-1]
        raise ConfigError(
            f"runtime.compile=true: the C++ compiler failed on the {name}: {last}; check that it works and that the "
            "headers of this Python are installed (python3-dev), or set runtime.compile=false"
        ) from error
