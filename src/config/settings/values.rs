//! Values that are a choice of names. Names that this version cannot launch are listed as well: they
//! are valid configuration, and one preflight rule says `not in this version`.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $text)] $variant,)+
        }

        impl $name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Every name, in the order of the documentation.
            pub const NAMES: &'static [&'static str] = &[$($text),+];

            /// The name in a run config.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }

            /// The choice with this name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($text => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

choice!(
    /// What a run is for: the command that it is started with.
    RunKind {
        /// Training.
        Train = "train",
        /// Scores of a checkpoint on a data set.
        Eval = "eval",
        /// Trials of many tasks, to choose tasks from.
        Infer = "infer",
    }
);
choice!(
    /// `DEVICE`: where tensors live.
    DeviceName {
        /// CUDA where the driver shows a device, else the CPU.
        Auto = "auto",
        /// The CPU.
        Cpu = "cpu",
        /// CUDA, or the run does not start.
        Cuda = "cuda",
    }
);
choice!(
    /// `MODEL_DTYPE`: element type of matrix products.
    ModelDtype {
        /// 32-bit float.
        F32 = "f32",
        /// bfloat16, with parameters, gradients and moments of the trainer in f32.
        Bf16 = "bf16",
    }
);
choice!(
    /// `TRAINING_MODE`: where rollouts run.
    TrainingMode {
        /// One pool; every rank trains and generates in turn.
        Sync = "sync",
        /// Separate pools; the trainer does not wait for the slowest trial.
        Async = "async",
    }
);
choice!(
    /// `MODEL_ENGINE`: parallel plan of the trainer.
    ModelEngine {
        /// Sharded data parallelism, dense policies.
        Fsdp = "fsdp",
        /// With expert and sequence parallelism, for mixture-of-experts policies.
        Veomni = "veomni",
        /// Tensor and pipeline parallelism.
        Megatron = "megatron",
    }
);
choice!(
    /// `SCAFFOLD`: the agent that works on the task.
    Scaffold {
        /// The built-in shell agent.
        Mini = "mini",
        /// OpenHands SDK.
        Ohsdk = "ohsdk",
        /// OpenHands.
        Oh = "oh",
        /// Claude Code.
        Cc = "cc",
        /// OpenCode.
        Oc = "oc",
        /// Terminus 2.
        Terminus2 = "terminus2",
        /// A command of the run config.
        Custom = "custom",
    }
);
choice!(
    /// `BACKEND`: where sandboxes run.
    Backend {
        /// bubblewrap on this machine.
        Process = "process",
        /// A Docker daemon.
        Docker = "docker",
        /// Kubernetes pods.
        K8s = "k8s",
        /// Apptainer on the node.
        Apptainer = "apptainer",
    }
);
choice!(
    /// `TOOL_CALL_PARSER`: markup of tool calls in sampled text.
    ToolCallParser {
        /// JSON inside `<tool_call>`.
        Hermes = "hermes",
        /// XML parameters inside `<tool_call>`.
        Qwen3Coder = "qwen3_coder",
        /// vLLM's second parser of the same markup.
        Qwen3Xml = "qwen3_xml",
        /// Llama 3.
        Llama3Json = "llama3_json",
        /// Llama 4.
        Llama4Pythonic = "llama4_pythonic",
        /// Calls as a Python list.
        Pythonic = "pythonic",
        /// Mistral.
        Mistral = "mistral",
        /// DeepSeek V3 and R1.
        DeepseekV3 = "deepseek_v3",
        /// DeepSeek V3.1.
        DeepseekV31 = "deepseek_v31",
        /// GLM 4.5.
        Glm45 = "glm45",
        /// GLM 4.7.
        Glm47 = "glm47",
        /// Kimi K2.
        KimiK2 = "kimi_k2",
        /// MiniMax M2.
        MinimaxM2 = "minimax_m2",
        /// Seed OSS.
        SeedOss = "seed_oss",
        /// Step 3.
        Step3 = "step3",
        /// Granite.
        Granite = "granite",
        /// Hunyuan.
        HunyuanA13b = "hunyuan_a13b",
        /// InternLM.
        Internlm = "internlm",
        /// Jamba.
        Jamba = "jamba",
        /// Phi 4 mini.
        Phi4MiniJson = "phi4_mini_json",
        /// xLAM.
        Xlam = "xlam",
        /// gpt-oss.
        Openai = "openai",
        /// The one of these that the checkpoint's chat template writes.
        Auto = "auto",
    }
);
choice!(
    /// `ADV_ESTIMATOR`.
    AdvEstimator {
        /// Group-relative advantages.
        Grpo = "grpo",
        /// Generalised advantage estimation with a critic.
        Gae = "gae",
        /// Leave-one-out baseline.
        Rloo = "rloo",
        /// REINFORCE++.
        ReinforcePlusPlus = "reinforce_plus_plus",
        /// REINFORCE++ with the group's mean as baseline.
        ReinforcePlusPlusBaseline = "reinforce_plus_plus_baseline",
    }
);
choice!(
    /// `POLICY_LOSS_MODE`.
    PolicyLossMode {
        /// Token-level PPO clip.
        Vanilla = "vanilla",
        /// Sequence-level ratio.
        Gspo = "gspo",
    }
);
choice!(
    /// `LOSS_AGG_MODE`.
    LossAggMode {
        /// Mean over all tokens of the batch.
        TokenMean = "token-mean",
        /// Mean over sequences of the mean over tokens.
        SeqMeanTokenMean = "seq-mean-token-mean",
        /// Mean over sequences of the sum over tokens.
        SeqMeanTokenSum = "seq-mean-token-sum",
    }
);
choice!(
    /// `KL_LOSS_TYPE`, `KL_PENALTY`.
    KlLossType {
        /// k3: `exp(r - p) - (r - p) - 1`, clamped.
        LowVarKl = "low_var_kl",
        /// The same.
        K3 = "k3",
        /// `p - r`.
        Kl = "kl",
        /// The same.
        K1 = "k1",
        /// `(p - r)^2 / 2`.
        Mse = "mse",
        /// The same.
        K2 = "k2",
        /// `|p - r|`.
        Abs = "abs",
    }
);
choice!(
    /// `KL_CTRL_TYPE`.
    KlControl {
        /// `KL_COEF` in every step.
        Fixed = "fixed",
        /// Grows above `KL_TARGET` and shrinks below it.
        Adaptive = "adaptive",
    }
);
choice!(
    /// `ROLLOUT_IS`: importance weights between the policy that sampled and the one before the update.
    RolloutIs {
        /// A weight for each token.
        Token = "token",
        /// One for the whole sequence: the product of its tokens' weights.
        Sequence = "sequence",
    }
);
choice!(
    /// A criterion of `ROLLOUT_RS`: what is looked at, and the distance by token.
    RejectionCriterion {
        /// Log ratio of each token.
        TokenK1 = "token_k1",
        /// Half of its square.
        TokenK2 = "token_k2",
        /// k3 of each token.
        TokenK3 = "token_k3",
        /// Log ratio of the sequence.
        SeqSumK1 = "seq_sum_k1",
        /// Sum of k2.
        SeqSumK2 = "seq_sum_k2",
        /// Sum of k3.
        SeqSumK3 = "seq_sum_k3",
        /// Mean log ratio: the geometric mean of the ratios.
        SeqMeanK1 = "seq_mean_k1",
        /// Mean of k2.
        SeqMeanK2 = "seq_mean_k2",
        /// Mean of k3.
        SeqMeanK3 = "seq_mean_k3",
        /// Largest k2.
        SeqMaxK2 = "seq_max_k2",
        /// Largest k3.
        SeqMaxK3 = "seq_max_k3",
    }
);

impl RejectionCriterion {
    /// True for ratios, which are bounded on both sides.
    pub fn has_lower_bound(self) -> bool {
        matches!(self, Self::TokenK1 | Self::SeqSumK1 | Self::SeqMeanK1)
    }
}

choice!(
    /// `LR_SCHEDULER`.
    LrScheduler {
        /// Constant after the warm-up.
        Constant = "constant",
        /// Half a cosine to zero at the last step.
        Cosine = "cosine",
        /// Straight to zero at the last step.
        Linear = "linear",
    }
);
