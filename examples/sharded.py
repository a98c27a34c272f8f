"""The decoder of `decoder.py` on eight devices: decodes in int8, and learns with sharded weights.

Eight devices of the CPU form a mesh, which divides the batch into two parts, and the heads and the
hidden layer into four (Megatron). The float weights are put on it; scales, codes and caches follow.
In training, each device has an eighth of each weight (FSDP), and sends it to the others in 8 bits.
Prints results compared with those of one device, and the bytes that a device sends, counted in the
compiled programs. Asserts its claims.

Needs `pip install -e ".[examples]"`. Takes two minutes on two cores.
"""

import math
import re
from collections import Counter
from functools import partial

import decoder as plain
import jax
import jax.numpy as jnp
import optax
from decoder import CONTEXT, HEADS, PROMPT, decoder, empty_cache, greedy, int8_cache, judge
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jqx

jax.config.update("jax_num_cpu_devices", 8)  # before any device is used
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ALL, BATCH, STEPS = ("data", "model"), 16, 10
SPECS = {  # queries, keys and values are [layer, in, 3, head, out]: each device has whole heads
    "embed": P(),
    "place": P(),
    "layers": {
        "qkv": P(None, None, None, "model"),
        "out": P(None, "model"),
        "up": P(None, None, "model"),
        "down": P(None, "model"),
    },
}


def place(tree, specs):
    """Puts arrays on the mesh by PartitionSpecs: one for all, or a tree of them."""
    if isinstance(specs, P):
        specs = jax.tree.map(lambda _: specs, tree)
    return jax.device_put(tree, jax.tree.map(partial(NamedSharding, MESH), specs))


def on_mesh(cache, batch):
    """Returns an empty cache, with its batch and heads partitioned over the devices."""
    spec = NamedSharding(MESH, P(None, None, "data", None, "model"))
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, spec), cache(batch))


def sent(compiled, count):
    """Returns the bytes that one of `count` devices sends, by collective and type of element."""
    part, found = 1 - 1 / count, Counter()
    kinds = {"all-reduce": 2 * part, "all-gather": part, "all-to-all": part}
    kinds["reduce-scatter"] = count * part
    for types, kind in re.findall(rf"= (.+) ({'|'.join(kinds)})\(", compiled.as_text()):
        for dtype, bits, dims in re.findall(r"([a-z]+(\d+))\[([\d,]*)\]", types):
            size = math.prod(map(int, filter(None, dims.split(","))))
            found[kind, dtype] += int(size * int(bits) / 8 * kinds[kind])
    return found


def show_sent(title, floats, codes):
    """Prints the bytes that are sent in float and in codes."""
    print(f"\n{title:44}{'float32':>12}{'quantized':>12}")
    for kind, dtype in sorted({*floats, *codes}):
        row = floats[kind, dtype], codes[kind, dtype]
        print(f"  {kind + ' ' + dtype:42}{row[0]:12,}{row[1]:12,}")
    print(f"  {'all':42}{floats.total():12,}{codes.total():12,}")


@partial(jax.jit, static_argnums=(0, 3))
def run(apply, params, prompts, cache):
    """Returns the logits of prompts, and their continuations."""
    logits, _ = apply(params, prompts, cache(len(prompts)), 0)
    return logits, greedy(apply, params, prompts, cache)


def decode(params, text, held_out):
    """Calibrates, quantizes and decodes on one device and on the mesh, and compares."""
    given, prompts = place(params, SPECS), held_out[:BATCH, :PROMPT]
    rows = list(text[: 4 * BATCH * CONTEXT].reshape(4, BATCH, CONTEXT))
    policy = jqx.presets.w8a8(tables="int8")
    plan = jqx.make_plan(decoder, policy)(params, rows[0], empty_cache(BATCH), 0)
    models = []
    for p, batches in ((params, rows), (given, place(rows, P("data")))):
        calls = [(batch, empty_cache(BATCH), 0) for batch in batches]
        stats = jqx.calibrate_batches(decoder, plan, p, calls)
        convert = partial(jqx.convert, decoder, plan, jqx.affines(plan, stats))
        q = jqx.quantize_params(p, plan)  # codes stay on the devices of the floats
        models.append({"float32": (decoder, p, empty_cache), "W8A8": (convert(), q, int8_cache)})
    one, many = models
    places = jax.tree.map(lambda x: x.sharding, given)
    in_16_bits = convert(partial_dtype=jnp.bfloat16, shardings=places)
    many["W8A8, sums of bfloat16"] = (in_16_bits, q, int8_cache)
    expected = {
        name: jax.device_get(run(apply, p, prompts, cache))
        for name, (apply, p, cache) in one.items()
    }

    print(f"\n{'8 devices compared with 1':26}{'logits differ':>14}{'tokens equal':>14}", end="")
    print(f"{'bytes on each, and on one':>27}")
    results, programs, parted = {}, {}, place(prompts, P("data"))
    for name, (apply, p, empty) in many.items():
        cache = partial(on_mesh, empty)
        logits, tokens = jax.device_get(run(apply, p, parted, cache))
        exact, likeliest = expected[name.partition(",")[0]]
        difference = abs(logits - exact).max() / abs(exact).max()
        equal = (tokens == likeliest).mean()
        state = jax.jit(cache, static_argnums=0)(BATCH)
        leaves = jax.tree.leaves((p, state))
        each = sum(x.addressable_shards[0].data.nbytes for x in leaves)
        print(f"{name:26}{difference:14.1e}{100 * equal:13.1f}%", end="")
        print(f"{each:14,}{sum(x.nbytes for x in leaves):13,}")
        results[name] = difference, equal
        programs[name] = jax.jit(apply).trace(p, parted[:, :1], state, PROMPT)

    *others, in_16_bits = programs.values()
    floats, codes = (sent(program.lower().compile(), 4) for program in others)
    show_sent("a step of decoding: bytes a device sends", floats, codes)
    # XLA on CPU adds bfloat16 in float32, so look at the program for the compiler of a TPU.
    written = in_16_bits.lower(lowering_platforms=("tpu",)).as_text()
    added = set(re.findall(r"all_reduce.*?-> tensor<\w+x(\w+)>", written, re.DOTALL))
    print("  with sums of bfloat16, a TPU adds", *added)
    # A float sum in another order may round to a neighbouring integer.
    limits = {"float32": (1e-5, 1), "W8A8": (0.01, 0.99), "W8A8, sums of bfloat16": (0.05, 0.9)}
    for name, (most, least) in limits.items():
        assert results[name][0] < most and results[name][1] >= least
    assert {kind for kind, _ in (*floats, *codes)} == {"all-reduce"} and added == {"bf16"}


def gather_floats(w):
    """Returns the whole of a weight that is partitioned along axis 1; scatters its gradient."""
    return lax.all_gather(w, ALL, axis=1, tiled=True)


def gather_codes(w):
    """Does the same in 8 bits, also for the gradient."""
    return jqx.parallel.all_gather(w, ALL, "int8:group=256", axis=1, tiled=True)


def learn(params, text):
    """Trains sharded 4-bit weights with collectives that send floats, and with codes."""
    plan = jqx.make_plan(decoder, jqx.presets.w4a8())(params, text[None, :8], empty_cache(1), 0)
    simulated, optimizer = jqx.simulate(decoder, plan), optax.adam(1e-3)
    starts = jax.random.randint(jax.random.key(2), (STEPS, BATCH, 1), 0, len(text) - CONTEXT)
    batches = list(text[starts + jnp.arange(CONTEXT + 1)])

    def alone(params, rows, gather=lambda w: w):
        def loss(params):
            return judge(simulated, jax.tree.map(gather, params), rows)[0]

        return jax.value_and_grad(loss)(params)

    def sharded(gather):
        def on_each(parts, rows):
            nats, gradients = alone(parts, rows, gather)
            # The gradient of a gathered weight is summed over the devices: this is the mean.
            return lax.pmean(nats, ALL), jax.tree.map(lambda g: g / 8, gradients)

        specs = P(None, ALL), P(ALL)
        return jax.shard_map(on_each, mesh=MESH, in_specs=specs, out_specs=(P(), specs[0]))

    parted = place(params, P(None, ALL)), place(batches, P(ALL))
    forms = {
        "one device": (alone, params, batches),
        "floats are sent": (sharded(gather_floats), *parted),
        "codes are sent": (sharded(gather_codes), *parted),
    }
    print(f"\n{'training of 4-bit weights':26}{'gradients differ':>17}{'nats after 1':>14}", end="")
    print(f"{f'after {STEPS} steps':>16}")
    errors, nats, bytes_sent, exact = [], [], [], None
    for name, (gradients_of, p, rows) in forms.items():

        def step(state, rows, gradients_of=gradients_of):
            loss, gradients = gradients_of(state[0], rows)
            updates, moments = optimizer.update(gradients, state[1])
            return (optax.apply_updates(state[0], updates), moments), loss, gradients

        state, losses = (p, optimizer.init(p)), []
        compiled = jax.jit(step).lower(state, rows[0]).compile()
        bytes_sent.append(sent(compiled, 8))
        for batch in tqdm(rows, name, leave=False, ncols=80, disable=None):
            state, loss, gradients = compiled(state, batch)
            losses.append(float(loss))
            if len(losses) == 1:
                own = jax.device_get(gradients)
                exact = own if exact is None else exact
                difference = jax.tree.map(lambda a, b: a - b, own, exact)
                errors.append(float(optax.global_norm(difference) / optax.global_norm(exact)))
        nats.append(losses)
        print(f"{name:26}{errors[-1]:17.4f}{losses[0]:14.4f}{losses[-1]:16.4f}")
    _, floats, codes = bytes_sent
    show_sent("a step of training: bytes a device sends", floats, codes)
    # Gradients are rounded to 8 bits (0.01). Weights are too, before they are rounded to 4 bits, so
    # some get the other of two neighbouring integers.
    assert errors[1] < 1e-4 and errors[2] < 0.2
    assert all(abs(a - b) < 0.02 for a, b in zip(nats[0], nats[2], strict=True))
    assert codes.total() < 0.3 * floats.total()


def main():
    """Trains in float on one device; does everything else on eight, compared with one."""
    letters, text, held_out = plain.manual()
    params = plain.train(decoder, plain.initial(jax.random.key(0), len(letters)), text, steps=200)
    layers = params["layers"]
    layers["qkv"] = layers["qkv"].reshape(*layers["qkv"].shape[:2], 3, HEADS, -1)
    decode(params, text, held_out)
    learn(params, text)
    print(
        "Claims hold: eight devices write the same as one, in float32 and in W8A8, and send only "
        "sums; sharded weights and their gradients are sent in 1/4 of the bytes."
    )


if __name__ == "__main__":
    main()
