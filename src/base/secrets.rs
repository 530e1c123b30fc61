//! Which names hold secrets, and the values that such names had in this process.

use std::sync::{PoisonError, RwLock};

static VALUES: RwLock<Vec<String>> = RwLock::new(Vec::new());

/// Remembers a secret's value as soon as it is read, so that nothing that leaves this process shows it: not
/// even the message that a configuration which copies it elsewhere is wrong.
pub fn remember_secret(value: &str) {
    let mut values = VALUES.write().unwrap_or_else(PoisonError::into_inner);
    if !values.iter().any(|known| known == value) {
        values.push(value.to_owned());
    }
}

/// Calls `each` with every value that was remembered.
pub fn remembered_secrets(mut each: impl FnMut(&str)) {
    for value in VALUES.read().unwrap_or_else(PoisonError::into_inner).iter() {
        each(value);
    }
}

/// True for names of variables whose values must never be shown.
pub fn is_secret(name: &str) -> bool {
    const MARKS: [&str; 7] = [
        "API_KEY",
        "ACCESS_KEY",
        "PRIVATE_KEY",
        "SECRET",
        "PASSWORD",
        "PASSWD",
        "CREDENTIAL",
    ];
    // `…_TOKENS` and `…_TOKEN_LEN_…` are counts; only a name that ends in TOKEN holds one.
    const ENDS: [&str; 4] = ["TOKEN", "AUTH", "BEARER", "JWT"];
    let name = name.to_ascii_uppercase();
    let last = name.rsplit('_').next().unwrap_or_default();
    MARKS.iter().any(|mark| name.contains(mark)) || ENDS.contains(&last)
}

#[cfg(test)]
mod tests {
    use super::is_secret;

    #[test]
    fn secrets_are_recognised_and_token_counts_are_not() {
        for name in [
            "WANDB_API_KEY",
            "HF_TOKEN",
            "DB_PASSWORD",
            "aws_secret_access_key",
            "AWS_ACCESS_KEY_ID",
            "REGISTRY_AUTH",
            "JWT",
        ] {
            assert!(is_secret(name), "{name}");
        }
        for name in [
            "ENGINE_KV_CACHE_TOKENS",
            "ACTOR_PPO_MAX_TOKEN_LEN_PER_GPU",
            "ENGINE_MAX_TOKENS_PER_TURN",
        ] {
            assert!(!is_secret(name), "{name}");
        }
    }
}
