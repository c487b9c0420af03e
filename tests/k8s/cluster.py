"""A real Kubernetes control plane on loopback: etcd, an API server with RBAC, and its controllers.

No scheduler and no kubelet: tests are both (see tests.k8s.pods). Version 1.20 lacks EndpointSlice
v1, which can be had as a CRD (see tests.k8s.gateway_api).
"""

import base64
import json
import os
import secrets
import shutil
import signal
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Self

import httpx

from router.common.child_processes import ChildProcess, ChildProcesses
from tests.conftest import find_free_ports
from tests.k8s import binaries

Manifest = dict[str, Any]
START = 240.0
MERGE = {"content-type": "application/merge-patch+json"}
API_SERVER, CONTROLLERS, ETCD = "kube-apiserver", "kube-controller-manager", "etcd"


def wait_for(what: str, condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Raises TimeoutError when the condition does not come to hold."""
    latest = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > latest:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)


class Cluster:
    """Three processes and one folder, which end with the `with` block.

    `token` is an administrator's. Paths of requests are those of Kubernetes' API.
    """

    def __init__(self, *flags: str) -> None:
        memory = Path("/dev/shm")  # etcd waits for the disk at every write
        base = memory if os.access(memory, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="disagg-k8s-", dir=base))
        self.token = secrets.token_hex(16)
        self.kubeconfig = self.folder / "kubeconfig"
        self.ca = self.folder / "apiserver.crt"
        self._port, self._etcd_port, self._peer_port = find_free_ports(3)
        self._flags = flags
        self._family = ChildProcesses(self.folder)
        self._children: dict[str, ChildProcess] = {}
        # Children die with the thread that started them: this one lives as long as they should,
        # whoever calls.
        self._starter = ThreadPoolExecutor(1)
        self._client: httpx.Client | None = None
        self._connecting = Lock()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        try:
            self._write_credentials()
            self._start(ETCD, *self._etcd_flags())
            self.start_api_server()
            self._start(CONTROLLERS, *self._controller_flags())
            wait_for("the default service account", self._has_default_account, START)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing here is worth a graceful end."""
        for name in list(self._children):
            self._stop(name, signal.SIGKILL)
        self._starter.shutdown()
        self._hang_up()
        shutil.rmtree(self.folder, ignore_errors=True)

    # The API server.

    def start_api_server(self) -> None:
        self._start(API_SERVER, *self._api_server_flags())
        wait_for("the API server", self._is_ready, START)

    def stop_api_server(self) -> None:
        """Requests raise httpx.TransportError from then on, those of other threads too."""
        self._stop(API_SERVER, signal.SIGKILL)

    def request(
        self,
        method: str,
        path: str,
        body: Manifest | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Raises httpx.HTTPStatusError, whose text has the server's own words."""
        answer = self._connected().request(method, path, json=body, headers=headers)
        if answer.is_error:
            told = f"{method} {path}: {answer.status_code} {_message(answer)}"
            raise httpx.HTTPStatusError(told, request=answer.request, response=answer)
        content: Manifest = answer.json()
        return content

    def get(self, path: str) -> Manifest:
        return self.request("GET", path)

    def create(self, path: str, manifest: Manifest) -> Manifest:
        """`path` is the collection's."""
        return self.request("POST", path, manifest)

    def merge(self, path: str, changes: Manifest) -> Manifest:
        return self.request("PATCH", path, changes, MERGE)

    def account_token(self, namespace: str, account: str) -> str:
        """As a pod of that service account finds it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token: str = self.create(path, asked)["status"]["token"]
        return token

    # etcd, behind the API server's back.

    def forget(self, key: str) -> None:
        """Deletes an object, such as pods/default/a, without a word to anybody who watches.

        While the API server is down: it hears of what happens in etcd as long as it runs.
        """
        assert API_SERVER not in self._children, "it would tell"
        name = base64.b64encode(f"/registry/{key}".encode()).decode()
        deleted = self._etcd("kv/deleterange", {"key": name}).get("deleted")
        assert deleted == "1", f"there is no {key}"

    def compact(self) -> None:
        """Forgets all history: who asks for it is told 410 Gone once the API server, which has a
        memory of its own, was restarted."""
        head = self._etcd("kv/range", {"key": "AA=="})["header"]["revision"]
        self._etcd("kv/compaction", {"revision": head, "physical": True})

    def _etcd(self, path: str, body: Manifest) -> Manifest:
        url = f"http://127.0.0.1:{self._etcd_port}/v3/{path}"
        content: Manifest = httpx.post(url, json=body, timeout=60).raise_for_status().json()
        return content

    # Processes.

    def _start(self, name: str, *flags: str) -> None:
        command = [binaries.kube(name), *flags]
        starting = self._starter.submit(self._family.start, name, command, "")
        self._children[name] = starting.result()

    def _stop(self, name: str, how: signal.Signals) -> None:
        child = self._children.pop(name, None)
        if child is None:
            return
        child.process.send_signal(how)
        try:
            child.process.wait(60)
        finally:
            child.process.kill()
            child.process.wait()
        self._family.children.remove(child)

    def _is_ready(self) -> bool:
        """Raises ChildEndedError."""
        self._check()
        if not self.ca.exists():
            return False
        try:
            return self._connected().get("/readyz").is_success
        except httpx.TransportError:
            return False

    def _has_default_account(self) -> bool:
        self._check()
        try:
            account = self.get("/api/v1/namespaces/default/serviceaccounts/default")
        except httpx.HTTPError:
            return False
        return bool(account.get("secrets"))

    def _check(self) -> None:
        for child in self._children.values():
            child.check()

    def _connected(self) -> httpx.Client:
        """One for all threads, and for all the API servers there will be."""
        with self._connecting:
            if self._client is None:
                self._client = httpx.Client(
                    base_url=self.url,
                    verify=ssl.create_default_context(cafile=str(self.ca)),
                    headers={"authorization": f"Bearer {self.token}"},
                    timeout=60,
                )
            return self._client

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    # What they are started with.

    def _etcd_flags(self) -> list[str]:
        url, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._peer_port))
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--log-level=error",
        ]

    def _api_server_flags(self) -> list[str]:
        key = self._key()
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",  # it would refuse 127.0.0.1 as an endpoint
            f"--secure-port={self._port}",
            f"--cert-dir={self.folder}",
            f"--token-auth-file={self.folder / 'tokens'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.96.0.0/16",
            *self._flags,
        ]

    def _controller_flags(self) -> list[str]:
        # Those of nodes would throw out pods of a node that never reports; slices are CRDs here.
        without = ("nodelifecycle", "nodeipam", "endpointslice", "endpointslicemirroring")
        return [
            f"--kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
            "--port=0",
            "--secure-port=0",
            f"--service-account-private-key-file={self._key()}",
            f"--root-ca-file={self.ca}",
            f"--controllers=*,{','.join('-' + name for name in without)}",
        ]

    def _key(self) -> Path:
        """Signs service accounts' tokens: the one that the API server makes for itself."""
        return self.folder / "apiserver.key"

    def _write_credentials(self) -> None:
        (self.folder / "tokens").write_text(f"{self.token},admin,admin,system:masters\n")
        cluster = {"server": self.url, "certificate-authority": str(self.ca)}
        context = {"cluster": "test", "user": "admin", "namespace": "default"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(json.dumps(config))
        self.kubeconfig.chmod(0o600)  # Helm complains otherwise


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError):
        return answer.text
