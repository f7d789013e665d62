"""How Sphinx builds the site: markdown by MyST, the reference from Google-style docstrings; offline, warnings are errors."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import fullshard

project = "fullshard"
release = version = fullshard.__version__
copyright = "the fullshard authors, BSD-3-Clause"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["attrs_inline", "deflist"]
myst_heading_anchors = 3  # headings are link targets, as on a repository's pages

default_role = "code"  # `name` in a docstring
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 100
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"fullshard {version}"
html_copy_source = False
html_show_sphinx = False

linkcheck_timeout = 20
linkcheck_retries = 2
