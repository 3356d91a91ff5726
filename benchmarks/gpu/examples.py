"""Part `per-example norms`: compare ghost norms of GPT-2 with the batch gradient."""

from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import train
from benchmarks.donated_buffers import compiled, compiled_together
from benchmarks.gpu import racing
from benchmarks.timing import Contender, Row, race
from optclip.per_example import clipped_grad, norms

SIZE = train.Size(letters=50_257, width=768, blocks=12, window=512, batch=32)


def rows(tiny: bool) -> Iterator[Row]:
    size = train.TINY if tiny else SIZE
    params, tokens = train.drawn(size)

    def loss(params: Any, window: jax.Array) -> jax.Array:
        return train.loss(params, window[None])

    def contender(function: Any) -> Contender:
        run, facts = compiled(function, params, tokens)
        return Contender(
            lambda: jax.block_until_ready(run(params, tokens)), facts=facts
        )

    functions = {
        "plain gradient": jax.grad(train.loss),
        "optclip, ghost norms": norms(loss, method="ghost"),
        "optclip, ghost clipping": clipped_grad(loss, 1.0, method="ghost"),
    }
    contenders = compiled_together(contender, functions)
    measured = race(contenders, racing.rounds(tiny), against="plain gradient")
    for row in racing.unchecked(measured):
        yield {"batch": size.batch, "window": size.window, **row}
