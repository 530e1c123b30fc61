//! Variables of what lies outside this machine or this version's own engine: parallel plan, routing
//! replay, importance weights, agent factory, Kubernetes, Docker.

use super::{integer, row, DefaultValue::*, Kind::*, Tier::*, Variable};
use crate::config::settings::values::RolloutIs;

const PLAN: &str = "Parallel plan";
const KUBERNETES: &str = "Kubernetes";
const DOCKER: &str = "Docker";

#[rustfmt::skip]
pub(super) const VARIABLES: &[Variable] = &[
    row(PLAN, "EP_SIZE", integer(1), Value("1"), "ranks", Common,
        "Ranks that share the experts of a layer."),
    row(PLAN, "GEN_TP", integer(1), Value("1"), "ranks", Common,
        "Ranks of an engine replica that share its attention heads; it divides the key-value heads."),
    row(PLAN, "ENABLE_R3", Bool, Unset("on for a mixture of experts, off for a dense policy"), "", Common,
        "Train with the experts that were chosen when a token was sampled."),
    row(PLAN, "FUSED_KERNELS", Bool, Value("False"), "", Advanced,
        "Fused loss kernels; `veomni` cannot use them."),
    row(PLAN, "ENABLE_ACTIVATION_OFFLOAD", Bool, Value("False"), "", Advanced,
        "Keep activations in host memory; `veomni` cannot use it."),
    row(PLAN, "ROLLOUT_IS", Choice(RolloutIs::NAMES), Unset("no importance weights"), "", Common,
        "Importance weights between the policy that sampled and the one that trains."),
    row(PLAN, "HARBOR_AGENT_NAME", Text, Unset("the scaffold decides"), "", Advanced,
        "Agent factory of Harbor; must stay empty for `oh` and `ohsdk`, which are imported by path."),

    row(KUBERNETES, "K8S_KUBECONFIG", Path, Unset("required under BACKEND=k8s"), "", Essential,
        "Credentials of the cluster that runs the sandboxes."),
    row(KUBERNETES, "K8S_NAMESPACE", Text, Value("default"), "", Common,
        "Namespace of the sandboxes."),
    row(KUBERNETES, "HARBOR_K8S_INLINE_BUILD", Bool, Value("False"), "", Common,
        "Build a task's image in its pod, which is slow; otherwise HARBOR_OPENSWE_IMAGE_REGISTRY has it."),
    row(KUBERNETES, "HARBOR_OPENSWE_IMAGE_REGISTRY", Text, Unset("images are built in the pod"), "", Common,
        "Registry of prebuilt task images."),
    row(KUBERNETES, "HARBOR_NYDUS_MIRROR", Text, Unset("images come from where the task says"), "", Common,
        "Mirror of the public images that validation tasks name."),

    row(DOCKER, "DOCKER_HOST", Text, Unset("the daemon of this machine"), "", Common,
        "Daemon that runs the sandboxes, for example tcp://host:2375."),
];
