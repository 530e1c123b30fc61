//! What the sandbox helper shares with its host: the [`protocol`] between them, and the [`tool`] and
//! prompt of the mini agent, so that whoever writes transcripts for a policy writes what the policy will
//! see.

pub mod protocol;
pub mod tool;

/// System message of the mini agent, without the final line break.
pub fn system_prompt() -> &'static str {
    include_str!("../prompt/system.txt").trim_end()
}

/// The `tools` of every request of the mini agent: a JSON array with the one tool `bash`.
pub fn tools_json() -> &'static str {
    include_str!("../prompt/tools.json")
}
