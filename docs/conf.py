"""How the documentation is built: `python -m sphinx -W docs build/docs`, with the extra `docs`."""

import pathlib
import sys

import jqx

sys.path.append(str(pathlib.Path(__file__).parent / "_ext"))

project = "jqx"
author = "The jqx developers"
copyright = "The jqx developers, Apache-2.0"
version = release = jqx.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "jqx_api",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the slow tests execute the notebooks; here their outputs are shown

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
default_role = "py:obj"  # `name` in a docstring: a link where there is such a name, else code

html_theme = "furo"
html_title = f"jqx {version}"
html_static_path = ["_static"]
html_css_files = ["jqx.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
