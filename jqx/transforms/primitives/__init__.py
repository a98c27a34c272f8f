"""What the transforms know of each primitive, one family a file."""

from ._contractions import CONTRACTIONS as CONTRACTIONS
from ._contractions import Contraction as Contraction
from ._form import Form as Form
from ._form import Records as Records
from ._forms import FORMS as FORMS
from ._updates import UPDATES as UPDATES
from ._view import View as View
from ._views import VIEWS as VIEWS
