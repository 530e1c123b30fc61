//! Real agents, unmodified, in real sandboxes, through the real proxy.
//!
//! ```text
//! agent in a sandbox ── Recorder (bytes on the wire) ── Proxy ── Router ── Recorded (tokens) ── engine
//!        └─ the task's own verifier gives the reward
//! ```
//!
//! The policy is a script: a function from the prompt to the reply ([`script`]), tokenised with Qwen3's own
//! tokenizer. What the proxy captured is then compared, token by token, with what the engine was asked and
//! sent and with what the agent received ([`check`]); nothing of the proxy's code takes part in that.
//!
//! An agent's runtime comes from `setup/runtimes.sh`. Tests of `cc` and `oc` fail without it, unless
//! LEGORL_OFFLINE is set; tests of the others say SKIP.

mod bench;
mod cc;
mod check;
mod custom;
mod oc;
mod oh;
mod ohsdk;
mod script;
mod terminus2;
mod wire;
