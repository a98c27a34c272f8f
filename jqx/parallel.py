"""Several devices: shardings of quantized parameters, and collectives for use inside
`jax.shard_map` that send codes instead of floats.
"""

from ._src.parallel.collectives import all_gather as all_gather
from ._src.parallel.collectives import all_reduce as all_reduce
from ._src.parallel.collectives import all_to_all as all_to_all
from ._src.parallel.collectives import ppermute as ppermute
from ._src.parallel.collectives import reduce_scatter as reduce_scatter
from ._src.parallel.shardings import shardings as shardings
