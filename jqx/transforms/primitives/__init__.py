"""The rules of the transforms for each primitive, one family a file."""

from ._carry import unchanged as unchanged
from ._contractions import Contraction as Contraction
from ._counts import counted as counted
from ._form import Form as Form
from ._form import Records as Records
from ._forms import FORMS as FORMS
from ._known import CONTRACTIONS as CONTRACTIONS
from ._known import VIEWS as VIEWS
from ._known import primitive_rules as primitive_rules
from ._known import tracked as tracked
from ._remat import REMAT as REMAT
from ._shardings import SHARDINGS as SHARDINGS
from ._updates import UPDATES as UPDATES
from ._view import View as View
