"""The server: OpenAI's HTTP API over the engine's asynchronous face, and tool calls on the wire."""
