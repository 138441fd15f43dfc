"""Tool calls as text: read (`ToolCallParser`), written (`format_tool_call`), and enforced while a model writes them (`structural_tag`).

Two formats: GLM's tags and Llama's JSON. Imports nothing but the standard library; `structural_tag` needs xgrammar when it is called.
"""
from __future__ import annotations

from .parser import FORMATS, Delta, ToolCallParser, format_tool_call, parse_tool_calls
from .shape import check_tools
from .tag import held_schema, json_beside_calls, structural_tag

__all__ = ["FORMATS", "Delta", "ToolCallParser", "check_tools", "format_tool_call", "held_schema", "json_beside_calls",
           "parse_tool_calls", "structural_tag"]
