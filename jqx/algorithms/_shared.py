"""What other folders of jqx import from this one, and users do not."""

from ._once import bodies_of as bodies_of
