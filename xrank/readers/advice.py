"""A next step that several readers give."""

from __future__ import annotations

ONE_SAVE = "let all ranks save into an empty folder, or copy the folder of one save again from where it was written"
"""Where files of two saves lie in one folder, and the format does not record which belong together.

Moving some of them away could leave a mixture that looks like a model.
"""
