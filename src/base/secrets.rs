//! Which names hold secrets.

/// True for names of variables whose values must never be shown.
pub fn is_secret(name: &str) -> bool {
    const MARKS: [&str; 5] = ["API_KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL"];
    let name = name.to_ascii_uppercase();
    // `…_TOKENS` and `…_TOKEN_LEN_…` are counts; only a name that ends in TOKEN holds one.
    MARKS.iter().any(|mark| name.contains(mark)) || name == "TOKEN" || name.ends_with("_TOKEN")
}

#[cfg(test)]
mod tests {
    use super::is_secret;

    #[test]
    fn secrets_are_recognised_and_token_counts_are_not() {
        for name in ["WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "aws_secret_access_key"] {
            assert!(is_secret(name), "{name}");
        }
        for name in ["ENGINE_KV_CACHE_TOKENS", "ACTOR_PPO_MAX_TOKEN_LEN_PER_GPU", "ENGINE_MAX_TOKENS_PER_TURN"] {
            assert!(!is_secret(name), "{name}");
        }
    }
}
