"""What the layers of every module library share: modes, and a function evaluated in one of them."""

from ._mode import Mode as Mode
