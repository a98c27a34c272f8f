"""Several devices: shardings of quantized parameters, and collectives for use inside
`jax.shard_map` that send codes instead of floats.
"""

from ._all_reduce import all_reduce as all_reduce
from ._all_to_all import all_to_all as all_to_all
from ._gather_and_scatter import all_gather as all_gather
from ._gather_and_scatter import reduce_scatter as reduce_scatter
from ._ppermute import ppermute as ppermute
from ._shardings import shardings as shardings
