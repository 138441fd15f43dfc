"""A transfer agent with a hand on it: transfers that do not begin, notices that are lost, late or doubled. What it lets through is real."""
from minengine.disagg.agents import Transfer, TransferError


class Gated:
    """While `shut`, reads (or writes) are put off: they are under way for their caller, and touch memory when the gate is opened, not before."""

    def __init__(self, agent):
        self.agent = agent
        self.shut = set()  # of "READ", "WRITE"
        self.only = lambda pieces: True  # which of these
        self.fail = set()  # operations that end in an error
        self.lost = False  # notices are not sent
        self.kept = None  # a list: they are kept in it
        self.put_off = []

    def __getattr__(self, name):
        return getattr(self.agent, name)

    def read(self, peer, address, pieces, **more):
        return self._start("READ", self.agent.read, peer, address, pieces, more)

    def write(self, peer, address, pieces, **more):
        return self._start("WRITE", self.agent.write, peer, address, pieces, more)

    def _start(self, operation, begin, peer, address, pieces, more):
        if operation in self.fail:
            raise TransferError(f"the {operation} was made to fail")
        transfer = Transfer(peer, operation, pieces)
        transfer.begin = lambda: begin(peer, address, pieces, **more)
        transfer.real = None
        self.put_off.append(transfer)
        self.poll(transfer)
        return transfer

    def poll(self, transfer):
        if transfer.real is None and transfer.error is None and not (transfer.operation in self.shut and self.only(transfer.pieces)):
            self.put_off.remove(transfer)
            try:
                transfer.real = transfer.begin()
            except TransferError as error:
                transfer.state, transfer.error = "ERR", error
        if transfer.real is None:
            return transfer.state
        transfer.state = self.agent.poll(transfer.real)
        transfer.error = transfer.real.error
        return transfer.state

    def release(self, transfer):
        return self.poll(transfer) != "PROC" and (transfer.real is None or self.agent.release(transfer.real))

    def telemetry(self, transfer):
        return self.agent.telemetry(transfer.real)

    def notify(self, peer, message):
        if self.kept is not None:
            self.kept.append((peer, message))
        elif not self.lost:
            self.agent.notify(peer, message)

    def deliver(self):
        """Send what was kept, and keep no more."""
        kept, self.kept = self.kept, None
        for peer, message in kept:
            self.agent.notify(peer, message)
