"""The Role is exactly what the launcher needs: run the launcher's code as the account that has it.

The namespace's quota allows no pods, so the launcher also has to find out why none starts.
"""

from __future__ import annotations

import secrets
import time

import pytest
import yaml
from kubernetes import client

from steadytrain.components.shared import retry
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.cluster import POD, Refused
from steadytrain.components.shared.config import ComputeConfig, RecoveryConfig
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec
from steadytrain.components.train.launch import follow
from steadytrain.components.train.launch.follow import JobFollower
from steadytrain.components.train.launch.job import TrainJob
from steadytrain.components.train.launch.naming import attempt_labels, job_name
from steadytrain.components.train.launch.own_pod import WORKFLOW, OwnPod
from steadytrain.components.train.launch.removal import remove_jobs
from steadytrain.pipelines.cluster.doctor import RIGHTS

from support.manifests import build
from support.namespaces import (
    apply,
    as_account,
    in_namespace,
    kubectl,
    needs_cluster,
    own_namespace,
)

pytestmark = needs_cluster

ACCOUNT, ROLE = "pipeline-runner", "steadytrain-launcher"
EVERY = [(right, verb) for right in RIGHTS for verb in right.verbs]
NEEDED = [(right, verb) for right, verb in EVERY if verb != "patch"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Fail on a missing right immediately instead of waiting for it to appear."""
    monkeypatch.setattr(retry, "DENIED_SECONDS", 0.0)


@pytest.fixture(scope="module")
def role(tmp_path_factory):
    """Yield the Role, bound to the account in a namespace whose quota allows no pods."""
    scratch = tmp_path_factory.mktemp("rights")
    with own_namespace("rights") as namespace:
        kubectl("create", "serviceaccount", ACCOUNT, "-n", namespace)
        kubectl("create", "quota", "none", "--hard=pods=0", "-n", namespace)
        objects = in_namespace(build("standalone", (), scratch), namespace)
        apply([item for item in objects if item["kind"] in ("Role", "RoleBinding")])
        yield next(item for item in objects if item["kind"] == "Role")


@pytest.fixture(scope="module")
def account(role):
    """Return a connection to the cluster as the account, with a token of its own."""
    namespace = role["metadata"]["namespace"]
    return as_account(ACCOUNT, namespace)


@pytest.fixture
def launch(account, tmp_path, monkeypatch):
    """Make every request of the launcher, from reading its own pod to removing its job."""
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.1)
    run = f"rights-{secrets.token_hex(4)}"
    attempts = tmp_path / run / "attempts"
    folder = AttemptFolder(attempts / "0001")
    folder.path.mkdir(parents=True)
    spec = AttemptSpec(
        attempt=1,
        run_id=run,
        config="",
        data="",
        batch=BatchSettings(1),
        gradient_accumulation_steps=1,
    )
    job = TrainJob(
        name=job_name(run, 1),
        folder=str(folder.path),
        labels=attempt_labels(spec),
        command=["true"],
        compute=ComputeConfig(device="cpu", nodes=2),
        recovery=RecoveryConfig(),
        own=OwnPod(image="none.test/none:0"),
    )

    def everything():
        told = []
        account.get(POD, "the-launchers-own")
        account.get(WORKFLOW, "the-runs-own")
        follower = JobFollower(account, job, folder, told.append)
        follower.make()
        follower.make()  # as after a lost response
        deadline = time.monotonic() + 30
        while not told and not follower.gone:
            assert time.monotonic() < deadline
            follower.look()
            time.sleep(0.2)
        remove_jobs(account, run, attempts, TrainJob.kinds, seconds=30)
        return told, follower.gone

    return everything


def test_launcher_with_the_whole_role_launches_explains_and_cleans_up(role, launch):
    told, gone = launch()
    assert told or gone
    kinds = "trainjobs,trainingruntimes"
    assert not kubectl("get", kinds, "-n", role["metadata"]["namespace"], "-o", "name")


@pytest.mark.parametrize(
    ("right", "verb"), NEEDED, ids=[f"{verb}-{right.resource}" for right, verb in NEEDED]
)
def test_missing_verb_is_named(role, account, launch, right, verb):
    apply([without(role, right, verb)])
    try:
        wait_until(account, right, verb, allowed=False)
        with pytest.raises(Refused, match=f'cannot {verb} resource "{right.resource}"'):
            launch()
    finally:
        apply([role])
        wait_until(account, right, verb, allowed=True)
        namespace = role["metadata"]["namespace"]
        kubectl("delete", "trainjobs,trainingruntimes", "--all", "-n", namespace)


def test_job_that_may_not_be_suspended_is_removed_all_the_same(role, account, launch):
    (right,) = (right for right, verb in EVERY if verb == "patch")
    apply([without(role, right, "patch")])
    try:
        wait_until(account, right, "patch", allowed=False)
        launch()
        assert not kubectl("get", "trainjobs", "-n", role["metadata"]["namespace"], "-o", "name")
    finally:
        apply([role])
        wait_until(account, right, "patch", allowed=True)


def test_account_may_do_nothing_else_in_the_namespace(account):
    spec = client.V1SelfSubjectRulesReviewSpec(namespace=account.namespace)
    review = client.AuthorizationV1Api(account.client).create_self_subject_rules_review(
        client.V1SelfSubjectRulesReview(spec=spec)
    )
    allowed = {
        (group, resource, verb)
        for rule in review.status.resource_rules
        for group in rule.api_groups
        for resource in rule.resources
        for verb in rule.verbs
        if group not in ("authorization.k8s.io", "authentication.k8s.io")  # your own rights
    }
    assert allowed == {(right.group, right.resource, verb) for right, verb in EVERY}


def without(role, right, verb):
    copy = yaml.safe_load(yaml.safe_dump(role))
    for rule in copy["rules"]:
        if rule["resources"] == [right.resource]:
            rule["verbs"].remove(verb)
    copy["rules"] = [rule for rule in copy["rules"] if rule["verbs"]]
    return copy


def wait_until(account, right, verb, *, allowed):
    """Wait until the authorizer applies a change of the Role."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {
            "resourceAttributes": {
                "namespace": account.namespace,
                "group": right.group,
                "resource": right.resource,
                "verb": verb,
            }
        },
    }
    api = client.AuthorizationV1Api(account.client)
    deadline = time.monotonic() + 30
    while api.create_self_subject_access_review(review).status.allowed is not allowed:
        assert time.monotonic() < deadline
        time.sleep(0.1)
