"""Random functions of parameters, rows of floats and rows of tokens: towers, norms, gates, scans,
branches, experts, convolutions, shared and tied weights, tables that are looked up more than once.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import on_device

ROWS, TOKENS, EXPERTS, LAYERS = 12, 8, 3, 2
SOURCES = "lookup", "embedded", "looked_up_in_scan", "looked_up_in_branches", "looked_up_in_loop"
SOURCES += "tables_of_layers", "linear", "normed", "lookup", "lookup"
MIDDLE = "combined", "windowed", "sliced", "normed", "branches", "combined"
SINKS = "linear", "mlp", "experts", "convolution", "layers", "attention", "called_twice", "keyed"
SINKS += "of_parameters", "linear", "mlp", "normed"


def norm(x, gain, centred=False):
    """A norm of the last axis."""
    x = x - x.mean(-1, keepdims=True) if centred else x
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3) * along(gain, x)


def along(v, x):
    """A vector as x has its channels."""
    return v.reshape((1,) * (x.ndim - v.ndim) + v.shape)


class Program:
    """One function `f(p, x, t)` of a seed: some strands, each from something that can be scaled to
    something that can compensate for it, which share parameters. All values are [ROWS, width].
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.width = int(self.rng.choice([8, 12, 16]))
        self.params, self.steps, self.names = {}, [], []
        for _ in range(int(self.rng.integers(1, 4))):
            self.add(SOURCES)
            for _ in range(int(self.rng.integers(3))):
                self.add(MIDDLE)
            self.add(SINKS)
        self.names.append("last")
        self.steps.append(self.last())

    def add(self, kinds):
        self.names.append(self.one(*kinds))
        self.steps.append(getattr(self, self.names[-1])())

    def __call__(self, p, x, t):
        values = [x[:, : self.width]]
        for step in self.steps:
            values.append(step(p, values, t))
        return values[-1]

    def one(self, *choices):
        return choices[int(self.rng.integers(len(choices)))]

    def leaf(self, *shape, near=0.0, again=0.15):
        """The name of a parameter, sometimes one that is in use already."""
        names = [name for name, x in self.params.items() if x.shape == shape]
        if names and self.rng.random() < again:
            return self.one(*names)
        spread = np.exp(self.rng.normal(size=shape[-1:] or ()))
        fan = shape[-2] if len(shape) > 1 else 1
        x = near + self.rng.normal(size=shape) * spread / fan**0.5
        name = f"{len(self.params):02}"
        self.params[name] = on_device(x, np.float32)
        return name

    def of(self):
        """An earlier value, most often the last one."""
        back = int(self.rng.geometric(0.9))
        return lambda values: values[max(len(values) - back, 0)]

    def gain(self, *layers):
        return self.leaf(*layers, self.width, near=1.0, again=0.4)

    # Lookups

    def table(self):
        return self.leaf(TOKENS, self.width, again=0.6)

    def lookup(self):
        name, by, d = self.table(), int(self.rng.integers(TOKENS)), self.width
        return self.one(
            lambda p, v, t: p[name][(t + by) % TOKENS],
            lambda p, v, t: p[name][t] + p[name][(t + by) % TOKENS],
            lambda p, v, t: jnp.concatenate(
                [p[name][t][:, : d // 2], p[name][t + 0][:, d // 2 :]], 1
            ),
            lambda p, v, t: jnp.concatenate([p[name][t][:, d // 2 :], p[name][t][:, : d // 2]], 1),
            lambda p, v, t: p[name][::-1][t],
            lambda p, v, t: p[name][:, ::-1][t] + p[name][t],
            lambda p, v, t: p[name][2:][t % 4] + p[name][: TOKENS - 2][t % 4],
            lambda p, v, t: p[name][:5][t % 5],
            lambda p, v, t: p[name][:5][t % 5] + p[name][t],
            lambda p, v, t: jax.nn.one_hot(t, TOKENS) @ p[name] + p[name][t],
            lambda p, v, t: jax.vmap(lambda i: p[name][i])(t),
            lambda p, v, t: p[name].T[:, t].T + p[name][t],
            lambda p, v, t: p[name].reshape(-1, d // 2)[t].repeat(2, 1),
            lambda p, v, t: lax.dynamic_slice(p[name], (t[0], np.int32(0)), (1, d)) + p[name][t],
            lambda p, v, t: p[name][np.arange(ROWS) % TOKENS],
            lambda p, v, t: p[name][np.arange(ROWS) % TOKENS] + p[name][t],
            lambda p, v, t: p[name][:1] + p[name][t],
            lambda p, v, t: p[name][t] * along(p[name][0], v[0]),
            lambda p, v, t: jnp.where((t > 3)[:, None], p[name][t], p[name][t % 2]),
            lambda p, v, t: jnp.broadcast_to(p[name][1], (3, d))[t % 3],
        )

    def embedded(self):
        """A lookup before a norm and a product, as models begin."""
        name, gain, w, h = self.table(), self.gain(), self.square(), self.of()
        return lambda p, v, t: (norm(p[name][t], p[gain]) + h(v)) @ p[w]

    def looked_up_in_scan(self):
        name, w, of = self.table(), self.leaf(LAYERS, self.width, self.width), self.of()

        def body(t, table):
            def step(c, xs):
                i, w = xs
                return c + table[(t + i) % TOKENS] @ w, table[(t + 2 * i) % TOKENS]

            return step

        def f(p, v, t):
            c, ys = lax.scan(body(t, p[name]), of(v), (jnp.arange(LAYERS, dtype=jnp.int32), p[w]))
            return c + ys[0]

        return f

    def looked_up_in_branches(self):
        name, w, u = self.table(), self.square(), self.square()
        other = self.one(name, self.table())
        return self.one(
            lambda p, v, t: lax.cond(
                t[0] > 3, lambda: p[name][t] @ p[w], lambda: p[other][t] @ p[u]
            ),
            lambda p, v, t: lax.cond(t[0] > 3, lambda: p[name][t], lambda: p[other][t // 2]) @ p[w],
            lambda p, v, t: lax.cond(
                t[0] > 3, lambda a: a[t] @ p[w], lambda a: a[:1] @ p[u] + 0 * v[0], p[name]
            ),
        )

    def looked_up_in_loop(self):
        name, w = self.table(), self.square()
        steps = np.int32(0), np.int32(2)
        return lambda p, v, t: (
            lax.fori_loop(*steps, lambda i, c: c + p[name][(t + i) % TOKENS], v[0]) @ p[w]
            + p[name][t]
        )

    def tables_of_layers(self):
        name, w, of = self.leaf(LAYERS, TOKENS, self.width), self.square(), self.of()
        step = lambda t: lambda c, a: (c + a[t], None)  # noqa: E731
        return self.one(
            lambda p, v, t: lax.scan(step(t), of(v), p[name])[0] @ p[w],
            lambda p, v, t: p[name][0][t] @ p[w] + p[name][1][t],
            lambda p, v, t: p[name].reshape(-1, self.width)[t] @ p[w] + p[name][1][t],
            lambda p, v, t: p[name][t % LAYERS, t] @ p[w],
            lambda p, v, t: p[name][t[0] % LAYERS][t] @ p[w],
        )

    # Products

    def square(self):
        return self.leaf(self.width, self.width)

    def linear(self):
        w, b, of = self.square(), self.leaf(self.width), self.of()
        half = self.width // 2
        return self.one(
            lambda p, v, t: of(v) @ p[w],
            lambda p, v, t: of(v) @ p[w] + along(p[b], v[0]),
            lambda p, v, t: of(v) @ p[w] + along(p[b], v[0]) + along(p[b][::-1], v[0]),
            lambda p, v, t: (of(v) + along(p[b], v[0])) @ p[w] + along(p[b], v[0]),
            lambda p, v, t: of(v) @ p[w].T,
            lambda p, v, t: (of(v) @ p[w]) @ p[w],
            lambda p, v, t: of(v) @ p[w][:, ::-1],
            lambda p, v, t: jnp.concatenate(jnp.split(of(v) @ p[w], 2, 1)[::-1], 1),
            lambda p, v, t: of(v)[:, :half] @ p[w][:half] + of(v)[:, half:] @ p[w][half:],
            lambda p, v, t: jnp.concatenate([of(v) @ p[w][:, :half], of(v) @ p[w][:, half:]], 1),
            lambda p, v, t: of(v) @ (p[w] * 2.0),
            lambda p, v, t: of(v) @ (p[w] * along(p[b], v[0])),
        )

    def mlp(self):
        up, down = self.leaf(self.width, 2 * self.width), self.leaf(2 * self.width, self.width)
        gate, b = self.leaf(self.width, 2 * self.width), self.leaf(2 * self.width)
        of, act = self.of(), self.activation()
        gained = self.one(b, self.leaf(2 * self.width, near=1.0))
        return self.one(
            lambda p, v, t: act(of(v) @ p[up] + along(p[b], v[0])) @ p[down],
            lambda p, v, t: of(v) + (act(of(v) @ p[gate]) * (of(v) @ p[up])) @ p[down],
            lambda p, v, t: (act(of(v) @ p[up]) * along(p[gained], v[0])) @ p[down],
            lambda p, v, t: (act(of(v) @ p[up]) / (2 + jnp.tanh(along(p[b], v[0])))) @ p[down],
            lambda p, v, t: act(of(v) @ p[up] + along(p[b], v[0])) @ p[up].T,
            lambda p, v, t: jnp.split(of(v) @ p[up] + along(p[b], v[0]), 2, 1)[1],
            lambda p, v, t: act(of(v) @ p[up]) @ p[down] + act(of(v) @ p[gate]) @ p[down],
            lambda p, v, t: of(v) @ p[up] @ p[down] + jnp.tile(of(v), 2) @ p[down],
        )

    def activation(self):
        return self.one(
            jax.nn.relu,
            jax.nn.relu,
            jax.nn.gelu,
            jax.nn.silu,
            jnp.tanh,
            jax.nn.relu6,
            jnp.abs,
            jax.nn.leaky_relu,
            lambda x: jnp.minimum(x, 2.0),
            lambda x: jax.nn.relu(x) ** 2 / 4,
            lambda x: x,
        )

    def normed(self):
        gain, other, b = (self.gain() for _ in range(3))
        w, u, of, centred = self.square(), self.square(), self.of(), bool(self.one(0, 1))
        return self.one(
            lambda p, v, t: norm(of(v), p[gain], centred) @ p[w],
            lambda p, v, t: norm(of(v), 1 + p[gain], centred) @ p[w],
            lambda p, v, t: norm(of(v), p[gain] * p[other], centred) @ p[w],
            lambda p, v, t: (norm(of(v), p[gain], centred) + along(p[b], v[0])) @ p[w] + of(v),
            lambda p, v, t: norm(of(v), p[gain]) @ p[w] + norm(v[0], p[gain]) @ p[u],
            lambda p, v, t: norm(norm(of(v), p[gain]) @ p[w], p[gain]) @ p[u],
            lambda p, v, t: norm(of(v), p[gain]) @ p[w] + norm(of(v), p[gain]) @ p[u],
            lambda p, v, t: norm(of(v), p[gain]),
            lambda p, v, t: norm(of(v), p[gain]) * along(p[other], v[0]) @ p[w],
            lambda p, v, t: norm(of(v), p[gain]) @ p[w] + along(p[gain], v[0]) @ p[u],
            lambda p, v, t: jnp.split(norm(of(v), p[gain]), 2, 1)[0] @ p[w][: self.width // 2],
        )

    def combined(self):
        a, b, s = self.of(), self.of(), self.leaf()
        roll = int(self.rng.integers(1, 4))
        return self.one(
            lambda p, v, t: a(v) + b(v),
            lambda p, v, t: a(v) - b(v),
            lambda p, v, t: jnp.tanh(a(v)) * b(v),
            lambda p, v, t: a(v) * jax.nn.sigmoid(b(v)),
            lambda p, v, t: jnp.maximum(a(v), b(v)),
            lambda p, v, t: a(v) * p[s],
            lambda p, v, t: jnp.roll(a(v), roll, 1),
            lambda p, v, t: jnp.where(b(v) > 0, a(v), 0),
            lambda p, v, t: jnp.cumsum(a(v), 0) / ROWS,
            lambda p, v, t: a(v) + a(v).mean(0, keepdims=True),
            lambda p, v, t: jnp.tile(a(v).reshape(ROWS, 2, -1).max(1), 2),
            lambda p, v, t: a(v)[:, : self.width // 2].repeat(2, 1),
            lambda p, v, t: jnp.pad(a(v)[:, 2:], ((0, 0), (1, 1))),
            lambda p, v, t: jax.checkpoint(lambda a: a * 0.5)(a(v)),
        )

    def windowed(self):
        of, d = self.of(), self.width
        w = self.leaf(d // 2, d)
        no, (start, stop) = (0, 0), self.one((0, d // 2), (d // 2, 0), (1, d // 2 - 1))
        add = lambda x, *more, **kinds: lax.reduce_window(x, 0.0, lax.add, *more, **kinds)  # noqa: E731
        most = lambda x, *more: lax.reduce_window(x, -jnp.inf, lax.max, *more)  # noqa: E731
        return self.one(
            lambda p, v, t: most(of(v), (1, 1), (1, 2), "VALID") @ p[w],
            lambda p, v, t: add(of(v), (1, 1), (1, 2), "VALID") @ p[w],
            lambda p, v, t: add(of(v), (1, 1), (1, 1), (no, (start, stop)))[:, d // 2 : d] @ p[w],
            lambda p, v, t: (
                add(of(v), (1, 1), (1, 1), (no, no), base_dilation=(1, 2))[:, : d // 2] @ p[w]
            ),
            lambda p, v, t: add(of(v), (2, 1), (1, 1), ((1, 0), no)),
            lambda p, v, t: most(of(v), (1, 2), (1, 2), "VALID") @ p[w],
            lambda p, v, t: add(of(v), (1, 2), (1, 2), "VALID", window_dilation=(1, 1)) @ p[w],
        )

    def of_parameters(self):
        """Products of parameters."""
        a, w, u, of = self.leaf(ROWS, self.width), self.square(), self.square(), self.of()
        name = self.table()
        return self.one(
            lambda p, v, t: p[a] @ p[w] + of(v),
            lambda p, v, t: p[a][::-1] @ p[w] + of(v) @ p[w],
            lambda p, v, t: of(v) @ (p[w] @ p[u]),
            lambda p, v, t: jax.nn.softmax((p[a] @ p[w]) @ of(v).T) @ (of(v) @ p[u]),
            lambda p, v, t: (p[name] @ p[w])[t],
            lambda p, v, t: (p[name] @ p[w])[t] + p[name][t] @ p[u],
            lambda p, v, t: of(v) @ (p[w] + p[u]),
            lambda p, v, t: of(v) @ (p[w] * p[u]),
        )

    def attention(self):
        q, k, w, o = (self.square() for _ in range(4))
        of, heads = self.of(), self.one(1, 2)

        def f(p, v, t):
            x = of(v)
            a, b, c = ((x @ p[name]).reshape(ROWS, heads, -1) for name in (q, k, w))
            shares = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", a, b) / a.shape[-1] ** 0.5)
            return jnp.einsum("hqk,khd->qhd", shares, c).reshape(ROWS, -1) @ p[o] + x

        return f

    # Loops and branches

    def layers(self):
        d, of, act = self.width, self.of(), self.activation()
        up, down = self.leaf(LAYERS, d, 2 * d), self.leaf(LAYERS, 2 * d, d)
        gain, one, b = self.gain(LAYERS), self.gain(), self.square()

        def body(p, checkpointed=False, shared=False):
            def step(c, xs):
                up, down, gain = xs
                h = norm(c, p[one] if shared else gain)
                h = h + c @ p[b] if shared else h
                return c + act(h @ up) @ down, c

            return jax.checkpoint(step) if checkpointed else step

        stack = lambda p: (p[up], p[down], p[gain])  # noqa: E731
        return self.one(
            lambda p, v, t: lax.scan(body(p), of(v), stack(p))[0],
            lambda p, v, t: lax.scan(body(p, shared=True), of(v), stack(p))[0],
            lambda p, v, t: lax.scan(body(p, True), of(v), stack(p), reverse=True)[0],
            lambda p, v, t: lax.scan(body(p), lax.scan(body(p), of(v), stack(p))[0], stack(p))[0],
            lambda p, v, t: lax.scan(body(p), of(v) @ p[up][0, :, :d], stack(p))[0],
            lambda p, v, t: lax.scan(body(p), of(v), stack(p))[1].sum(0) + along(p[gain][1], v[0]),
            lambda p, v, t: norm(lax.scan(body(p), of(v), stack(p))[0], p[gain][0]) @ p[b],
        )

    def branches(self):
        w, u, gain, of = self.square(), self.square(), self.gain(), self.of()
        return self.one(
            lambda p, v, t: lax.cond(t[0] > 3, lambda x: x @ p[w], lambda x: x @ p[u], of(v)),
            lambda p, v, t: lax.cond(t[0] > 3, lambda x: x @ p[w], lambda x: x, of(v)) @ p[u],
            lambda p, v, t: (
                lax.cond(t[0] > 3, lambda x: x, lambda x: x * p[gain][None], of(v)) @ p[u]
            ),
            lambda p, v, t: lax.switch(
                t[0] % 2, [lambda x, w: x @ w, lambda x, w: x + w[:1]], of(v), p[w]
            ),
            lambda p, v, t: of(v) @ lax.cond(t[0] > 3, lambda: p[w], lambda: p[u]),
            lambda p, v, t: lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ p[w]), of(v)) @ p[u],
            lambda p, v, t: (
                lax.while_loop(
                    lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + v[0]), (0, of(v) @ p[w])
                )[1]
                @ p[u]
            ),
            lambda p, v, t: jax.jit(lambda x: x @ p[w])(of(v)) @ p[u],
        )

    def called_twice(self):
        w, u, of = self.square(), self.square(), self.of()
        g = jax.jit(lambda a, b, x: jax.nn.relu(x @ a) @ b)
        return self.one(
            lambda p, v, t: g(p[w], p[u], of(v)) + g(p[u], p[w], of(v)),
            lambda p, v, t: g(p[w], p[u], g(p[w], p[u], of(v))),
            lambda p, v, t: g(p[w], p[u], v[0]) + g(p[w], p[u], of(v)),
        )

    def experts(self):
        d, of, act = self.width, self.of(), self.activation()
        up, down = self.leaf(EXPERTS, d, d), self.leaf(EXPERTS, d, d)
        sizes = on_device([5, 3, 4], np.int32)
        return self.one(
            lambda p, v, t: lax.ragged_dot(
                act(lax.ragged_dot(of(v), p[up], sizes)), p[down], sizes
            ),
            lambda p, v, t: jnp.einsum("nd,ndf->nf", of(v), p[up][t % EXPERTS]),
            lambda p, v, t: jnp.einsum("nd,edf->enf", of(v), p[up]).sum(0),
            lambda p, v, t: jnp.einsum(
                "enf,efd->nd", act(jnp.einsum("nd,edf->enf", of(v), p[up])), p[down]
            ),
            lambda p, v, t: of(v) @ p[up][t[0] % EXPERTS],
            lambda p, v, t: (
                of(v) @ lax.dynamic_index_in_dim(p[up], t[0] % EXPERTS, 0, False) @ p[up][1]
            ),
            lambda p, v, t: of(v) @ p[up][0] @ p[up][1] @ p[down][2],
            lambda p, v, t: jax.vmap(lambda w: act(of(v) @ w))(p[up]).max(0) @ p[down][0],
        )

    def sliced(self):
        w, b, of, d = (
            self.leaf(self.width, 2 * self.width),
            self.leaf(2 * self.width),
            self.of(),
            self.width,
        )
        at = lambda t: (np.int32(0), t[0] % d)  # noqa: E731
        return self.one(
            lambda p, v, t: of(v) @ lax.dynamic_slice(p[w], at(t), (d, d)),
            lambda p, v, t: of(v) + along(lax.dynamic_slice(p[b], (t[0] % d,), (d,)), v[0]),
            lambda p, v, t: (of(v) @ p[w] + along(p[b], v[0]))[:, :d] + along(p[b][:d], v[0]),
            lambda p, v, t: lax.dynamic_slice(of(v) @ p[w], at(t), (ROWS, d)),
            lambda p, v, t: of(v).at[:, 1].set(0.0) + along(p[b][d:], v[0]),
        )

    def convolution(self):
        d, of, act, groups = self.width, self.of(), self.activation(), self.one(1, 2, self.width)
        w, u = self.leaf(3, d // groups, d), self.leaf(1, d, d)
        b = self.leaf(d)

        def conv(x, w, groups=1):
            x = lax.conv_general_dilated(
                x[None], w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"),
                feature_group_count=groups,
            )  # fmt: skip
            return x[0]

        return self.one(
            lambda p, v, t: conv(of(v), p[w], groups),
            lambda p, v, t: conv(act(conv(of(v), p[w], groups) + along(p[b], v[0])), p[u]),
            lambda p, v, t: conv(act(conv(of(v), p[u])), p[w], groups) + of(v),
        )

    def keyed(self):
        """Random bits of typed keys inside of a scan, which change nothing."""
        d, of = self.width, self.of()
        w = self.leaf(LAYERS, d, d)

        def f(p, v, t):
            keys = jax.random.split(jax.random.key(0), LAYERS)

            def step(c, xs):
                x, key = c
                w, key_of_step = xs
                key, other = jax.random.split(key)
                x = x @ w + 0 * (jax.random.uniform(key_of_step) + jax.random.uniform(other))
                return (x, key), key_of_step

            return lax.scan(step, (of(v), jax.random.key(1)), (p[w], keys))[0][0]

        return f

    def last(self):
        w, name, of = self.leaf(self.width, 6, again=0), self.table(), self.of()
        ends = [i + 1 for i, kind in enumerate(self.names[:-1]) if kind in SINKS]
        whole = lambda v: sum(v[i] for i in ends)  # noqa: E731
        return self.one(
            lambda p, v, t: jnp.tanh(whole(v)) @ p[w],
            lambda p, v, t: whole(v) @ p[w],
            lambda p, v, t: norm(whole(v), jnp.ones(self.width)) @ p[name].T,
            lambda p, v, t: jnp.concatenate([v[i] @ p[w] for i in ends], 1),
            lambda p, v, t: jnp.concatenate([jnp.tanh(v[i]) for i in ends], 1),
            lambda p, v, t: jnp.concatenate([whole(v) @ p[w], of(v)], 1),
        )


def inputs(seed):
    """Rows of floats and of tokens. A channel has the same size for every seed, as in models."""
    rng, sizes = np.random.default_rng(seed), np.exp(np.random.default_rng(99).normal(size=16))
    x = rng.normal(size=(ROWS, 16)) * sizes
    return on_device(x, np.float32), on_device(rng.integers(0, TOKENS, ROWS), np.int32)


def together(programs):
    """One function of the parameters of many, which returns the results of each."""
    params = {f"{i}": program.params for i, program in enumerate(programs)}
    return lambda p, x, t: [program(p[f"{i}"], x, t) for i, program in enumerate(programs)], params
