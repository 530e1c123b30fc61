//! Removing secrets from text that leaves the program.

use std::{
    borrow::Cow,
    sync::{Arc, OnceLock, RwLock},
};

/// Shortest value that is taken for a secret: replacing shorter ones would hide ordinary words.
const MIN_SECRET: usize = 6;

const SHOWN: &str = "<redacted>";

/// Secrets to remove: values of variables with secret names, and the part after the dot in a session's
/// path (`/sess/<id>~<secret>/`).
#[derive(Debug, Default)]
pub struct Redactor {
    secrets: RwLock<Vec<String>>,
}

impl Redactor {
    /// The one of this process, for everything that it prints or writes. It knows the secrets of the
    /// environment; those of the configuration are added when it is loaded.
    pub fn global() -> &'static Arc<Self> {
        static GLOBAL: OnceLock<Arc<Redactor>> = OnceLock::new();
        GLOBAL.get_or_init(|| Arc::new(Self::of_process()))
    }

    /// Knows the secrets of the process environment.
    pub fn of_process() -> Self {
        let redactor = Self::default();
        for (name, value) in std::env::vars_os() {
            if let (Some(name), Ok(value)) = (name.to_str(), value.into_string()) {
                if crate::base::is_secret(name) {
                    redactor.add(&value);
                }
            }
        }
        redactor
    }

    /// Adds a value that must not be shown.
    pub fn add(&self, secret: &str) {
        if secret.len() >= MIN_SECRET {
            let mut secrets = self
                .secrets
                .write()
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            secrets.push(secret.to_owned());
            // A secret that contains another one goes first.
            secrets.sort_by_key(|s| std::cmp::Reverse(s.len()));
            secrets.dedup();
        }
    }

    /// The text without secrets.
    pub fn clean<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let mut out = Cow::Borrowed(text);
        crate::base::remembered_secrets(|secret| {
            if secret.len() >= MIN_SECRET && out.contains(secret) {
                out = Cow::Owned(out.replace(secret, SHOWN));
            }
        });
        for secret in self
            .secrets
            .read()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .iter()
        {
            if out.contains(secret.as_str()) {
                out = Cow::Owned(out.replace(secret.as_str(), SHOWN));
            }
        }
        if out.contains("/sess/") {
            out = Cow::Owned(without_session_secrets(&out));
        }
        out
    }
}

fn without_session_secrets(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("/sess/") {
        let (before, path) = rest.split_at(at + "/sess/".len());
        out.push_str(before);
        let end = path
            .find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '~')))
            .unwrap_or(path.len());
        let (segment, after) = path.split_at(end);
        match segment.rsplit_once('~') {
            Some((id, _)) => {
                out.push_str(id);
                out.push('~');
                out.push_str(SHOWN);
            }
            None => out.push_str(segment),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::Redactor;

    #[test]
    fn secrets_and_session_paths_are_removed() {
        let redactor = Redactor::default();
        redactor.add("hunter2hunter2");
        redactor.add("short");
        assert_eq!(redactor.clean("key=hunter2hunter2 short"), "key=<redacted> short");
        assert_eq!(
            redactor.clean("POST /sess/copy-03__ab12~5ecret99/v1/chat HTTP"),
            "POST /sess/copy-03__ab12~<redacted>/v1/chat HTTP"
        );
        assert_eq!(redactor.clean("GET /sess/plain/v1"), "GET /sess/plain/v1");
    }
}
