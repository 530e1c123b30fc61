//! An error and its causes as one line for a person.

use std::error::Error;

/// The message of `error` followed by those of its causes, joined by `: `. A cause that the text already
/// contains is left out: some errors quote their cause, and nobody should read it twice.
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::error_chain;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    enum Outer {
        #[error("cannot read `a`: {0}")]
        Quotes(#[source] io::Error),
        #[error("cannot read `a`")]
        Keeps(#[source] io::Error),
    }

    #[test]
    fn every_cause_is_told_once() {
        let told = "cannot read `a`: no space";
        assert_eq!(error_chain(&Outer::Quotes(io::Error::other("no space"))), told);
        assert_eq!(error_chain(&Outer::Keeps(io::Error::other("no space"))), told);
    }
}
