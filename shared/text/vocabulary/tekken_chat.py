"""Chats of Mistral's models whose folder has a ``tekken.json`` and no chat template.

The rules follow the package mistral-common. They depend on the version of the ``tekken.json``:
where the system prompt and the tools go, and how tool calls and their results are written.
"""

from __future__ import annotations

from collections.abc import Collection

# Later versions put settings of the model, such as an effort, into their prompts.
VERSIONS = {"v3": 3, "v7": 7, "v11": 11, "v13": 13}

_TEMPLATE = r"""
{%- macro text(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {{- content | map(attribute='text') | select | join('\n\n') -}}
  {%- endif -%}
{%- endmacro -%}

{%- macro arguments_json(arguments) -%}
  {%- if arguments is string -%}
    {{- (arguments or '{}') | from_json | tojson -}}
  {%- else -%}
    {{- arguments | tojson -}}
  {%- endif -%}
{%- endmacro -%}

{%- macro short(id) -%}
  {%- if id is not string or id | length != 9 or not id.isalnum() or not id.isascii() -%}
    {{- raise_exception('the id of a call must be 9 letters and digits') -}}
  {%- endif -%}
  {{- id -}}
{%- endmacro -%}

{%- macro result(message) -%}
  [TOOL_RESULTS]
  {%- if version == 3 -%}
    {%- set content = (text(message.content) or '{}') | from_json -%}
    {{- {'content': content, 'call_id': short(message.tool_call_id)} | tojson -}}
  {%- elif version < 13 -%}
    {{- short(message.tool_call_id) ~ '[TOOL_CONTENT]' ~ text(message.content) -}}
  {%- else -%}
    {{- text(message.content) -}}
  {%- endif -%}
  [/TOOL_RESULTS]
{%- endmacro -%}

{%- set follows = {
  '': ['system', 'user', 'assistant'],
  'system': ['system', 'user', 'assistant'],
  'user': ['system', 'user', 'assistant'],
  'assistant': ['system', 'user', 'assistant', 'tool'],
  'tool': ['system', 'user', 'assistant', 'tool'],
} -%}
{%- set ns = namespace(role='', system=[], groups=[], first=none, last=none, tools=[], ids=[]) -%}
{%- for message in messages -%}
  {%- if message.role not in follows[ns.role] -%}
    {{- raise_exception('a message of the role ' ~ message.role ~ ' cannot follow '
                        ~ (('one of the role ' ~ ns.role) if ns.role else 'nothing')) -}}
  {%- endif -%}
  {%- if message.role == 'system' and version == 3 -%}
    {%- set _ = ns.system.append(text(message.content)) -%}
  {%- elif message.role == ns.role and message.role != 'system' -%}
    {%- set _ = ns.groups[-1].messages.append(message) -%}
  {%- else -%}
    {%- set _ = ns.groups.append({'role': message.role, 'messages': [message]}) -%}
  {%- endif -%}
  {%- set ns.role = message.role -%}
{%- endfor -%}
{%- if version == 3 and (not ns.groups or ns.groups[0].role != 'user') -%}
  {%- set ns.groups = [{'role': 'user', 'messages': []}] + ns.groups -%}
{%- endif -%}
{%- for group in ns.groups -%}
  {%- if group.role == 'user' -%}
    {%- set ns.last = loop.index0 -%}
    {%- if ns.first is none -%}
      {%- set ns.first = loop.index0 -%}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- for tool in tools or [] -%}
  {%- set function = {
    'name': tool.function.name,
    'description': tool.function.description or '',
    'parameters': tool.function.parameters or {},
  } -%}
  {%- set _ = ns.tools.append({'type': 'function', 'function': function}) -%}
{%- endfor -%}

{{- bos_token -}}
{%- for group in ns.groups -%}
  {%- if group.role == 'system' -%}
    [SYSTEM_PROMPT]{{- text(group.messages[0].content) -}}[/SYSTEM_PROMPT]
  {%- elif group.role == 'user' -%}
    {%- if ns.tools and loop.index0 == (ns.first if version >= 13 else ns.last) -%}
      [AVAILABLE_TOOLS]{{- ns.tools | tojson -}}[/AVAILABLE_TOOLS]
    {%- endif -%}
    {%- set parts = namespace(all=[]) -%}
    {%- for message in group.messages -%}
      {%- if text(message.content) -%}
        {%- set _ = parts.all.append(text(message.content)) -%}
      {%- endif -%}
    {%- endfor -%}
    [INST]
    {%- if loop.index0 == ns.last and ns.system | join -%}
      {{- ns.system | select | join('\n\n') ~ '\n\n' -}}
    {%- endif -%}
    {{- parts.all | join('\n\n') -}}
    [/INST]
  {%- elif group.role == 'assistant' -%}
    {%- set turn = namespace(before='', text='', calls=[]) -%}
    {%- for message in group.messages -%}
      {%- set between = '\n\n' if turn.text else '' -%}
@THINKING@      {%- if text(message.content) -%}
        {%- set turn.text = turn.text ~ between ~ text(message.content) -%}
      {%- endif -%}
      {%- set turn.calls = turn.calls + (message.tool_calls or []) -%}
    {%- endfor -%}
    {%- if not turn.before and not turn.text and not turn.calls -%}
      {{- raise_exception('a message of the assistant has neither content nor calls') -}}
    {%- elif version == 3 and turn.text and turn.calls -%}
      {{- raise_exception('a message of the assistant has both content and calls') -}}
    {%- endif -%}
    {{- turn.before ~ (turn.text if turn.before else turn.text.rstrip(' ')) -}}
    {%- set array = namespace(calls=[]) -%}
    {%- for call in turn.calls -%}
      {%- set _ = ns.ids.append(call.id) -%}
      {%- if version >= 11 -%}
        [TOOL_CALLS]{{- call.function.name -}}
        {%- if version == 11 -%}
          [CALL_ID]{{- short(call.id) -}}
        {%- endif -%}
        [ARGS]{{- arguments_json(call.function.arguments) -}}
      {%- else -%}
        {%- set arguments = call.function.arguments -%}
        {%- if arguments is string -%}
          {%- set arguments = (arguments or '{}') | from_json -%}
        {%- endif -%}
        {%- set _ = array.calls.append(
          {'name': call.function.name, 'arguments': arguments, 'id': short(call.id)}) -%}
      {%- endif -%}
    {%- endfor -%}
    {%- if array.calls -%}
      [TOOL_CALLS]{{- array.calls | tojson -}}
    {%- endif -%}
    {{- eos_token -}}
  {%- elif version < 11 -%}
    {%- for message in group.messages -%}
      {{- result(message) -}}
    {%- endfor -%}
  {%- else -%}
    {%- for id in ns.ids -%}
      {%- for message in group.messages if message.tool_call_id == id -%}
        {{- result(message) -}}
      {%- endfor -%}
    {%- endfor -%}
    {%- for message in group.messages if message.tool_call_id not in ns.ids -%}
      {{- result(message) -}}
    {%- endfor -%}
    {%- set ns.ids = [] -%}
  {%- endif -%}
{%- endfor -%}
"""

# Only for models that have both tokens: the reasoning parser is chosen by the template.
_THINKING = r"""
      {%- if message.thinking -%}
        {%- set turn.before = turn.before ~ turn.text ~ '[THINK]' ~ message.thinking -%}
        {%- set turn.before = turn.before ~ '[/THINK]' -%}
        {%- set turn.text, between = '', '' -%}
      {%- endif -%}
"""


def tekken_chat(version: str, special: Collection[str]) -> str | None:
    """The chat template of a version with these special tokens; ``None`` if the version is
    unknown."""
    number = VERSIONS.get(version)
    if number is None:
        return None
    thinks = number >= 13 and {"[THINK]", "[/THINK]"} <= {*special}
    template = _TEMPLATE.replace("@THINKING@", _THINKING if thinks else "")
    return f"{{%- set version = {number} -%}}{template}".rstrip()
