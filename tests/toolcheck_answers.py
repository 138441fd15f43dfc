"""Cases, calls and answers for the tests of the suite, by hand, and a server that gives them."""
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from minengine.toolcheck import Answer, Case, Expect

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"], "additionalProperties": False}
SAVE = {"type": "function", "function": {"name": "save", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "other"}}


def case(choice="required", *, expect=None, text="Save.", **more):
    body = {"messages": [{"role": "user", "content": text}], "tools": [SAVE, OTHER], "tool_choice": choice, **more}
    return Case(id="types/x", category="types", checks="x", body=body, expect=expect or Expect())


def call(name="save", arguments='{"n": 3}', id="call_1", **more):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def answer(*calls, finish="tool_calls", **more):
    return Answer(calls=calls, finish_reason=finish, **more)


NAMED = {"type": "function", "function": {"name": "save"}}
MARK = {"code": "undeclared_tool", "message": "no such tool"}


def chunk(finish=None, **delta):
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def part(index, arguments="", **more):
    return {"index": index, "function": {"arguments": arguments, **({"name": more.pop("name")} if "name" in more else {})}, **more}


START = part(0, '{"n"', id="call_1", type="function", name="save")


@contextmanager
def double(respond, models=("m",)):
    """A server of canned answers: `respond(text of the body)` gives status, headers and the body's pieces."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send(200, {}, [json.dumps({"data": [{"id": name} for name in models]})])

        def do_POST(self):
            seen.append((self.path, dict(self.headers), text := self.rfile.read(int(self.headers["Content-Length"])).decode()))
            self.send(*respond(text))

        def send(self, status, headers, pieces):
            self.send_response(status)
            for item in {"Content-Type": "application/json", "Transfer-Encoding": "chunked", **headers}.items():
                self.send_header(*item)
            self.end_headers()
            for piece in pieces:
                if piece is None:  # cut the connection
                    self.close_connection = True
                    return
                self.wfile.write(f"{len(piece.encode()):x}\r\n".encode() + piece.encode() + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request, client_address):
            pass  # clients that give up are the point of some tests

    seen = []
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def completion(*calls, content=None, finish="tool_calls"):
    return json.dumps({"choices": [{"message": {"content": content, "tool_calls": list(calls)}, "finish_reason": finish}], "usage": {"completion_tokens": 9}})


def stream_of(*events):
    return 200, {"Content-Type": "text/event-stream; charset=utf-8"}, [f"data: {event}\r\n\r\n" for event in events]


STREAM = (chunk(role="assistant"), chunk(tool_calls=[START]), chunk(tool_calls=[part(0, ": 3}")]), chunk("tool_calls"), "[DONE]")
