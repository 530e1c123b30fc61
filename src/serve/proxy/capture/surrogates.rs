//! JSON from JavaScript: half of a surrogate pair, where an agent cut a text inside of a character.
//!
//! `JSON.stringify` writes it as an escape (`\ud83d`). JSON allows that; UTF-8 has no such character, and the
//! parser refuses it. A trial must not end by it, so each lone half is read as U+FFFD, as JavaScript itself
//! encodes it.

use serde::de::DeserializeOwned;

/// Parses JSON; lone surrogates are U+FFFD.
pub fn parse_json<T: DeserializeOwned>(raw: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice(raw).or_else(|error| match without_lone_surrogates(raw) {
        Some(whole) => serde_json::from_slice(&whole),
        None => Err(error),
    })
}

/// The same text with `\ufffd` for every lone half: what stands around it keeps its place. `None` if there is
/// none.
fn without_lone_surrogates(raw: &[u8]) -> Option<Vec<u8>> {
    let unit = |at: usize| {
        let digits = raw.get(at..at + 6)?.strip_prefix(b"\\u")?;
        u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    let mut out: Option<Vec<u8>> = None;
    let mut at = 0;
    while let Some(skip) = memchr::memchr(b'\\', &raw[at..]) {
        at += skip;
        match unit(at) {
            Some(0xd800..=0xdbff) if matches!(unit(at + 6), Some(0xdc00..=0xdfff)) => at += 12,
            Some(0xd800..=0xdfff) => {
                out.get_or_insert_with(|| raw.to_vec())[at + 2..at + 6].copy_from_slice(b"fffd");
                at += 6;
            }
            _ => at += 2,
        }
        if at >= raw.len() {
            break;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    fn text(raw: &str) -> Option<String> {
        parse_json(raw.as_bytes()).ok()
    }

    #[test]
    fn lone_halves_are_replaced_and_pairs_are_kept() {
        assert_eq!(text(r#""a\ud83d""#).unwrap(), "a\u{fffd}");
        assert_eq!(
            text(r#""\ud83d\ude00 \ude00\ud83d!""#).unwrap(),
            "\u{1f600} \u{fffd}\u{fffd}!"
        );
        assert_eq!(text(r#""\ud83d\ud83d\ude00""#).unwrap(), "\u{fffd}\u{1f600}");
        // An escaped backslash before a `u` is no escape of a character.
        assert_eq!(text(r#""\\ud83d""#).unwrap(), r"\ud83d");
        assert_eq!(text(r#""\ud83"#), None);
        assert_eq!(text(r#""\ud83d"#), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(crate::serve::proxy::fuzz_cases(1000)))]
        #[test]
        fn any_units_are_read_as_javascript_encodes_them(units in prop::collection::vec(
            prop_oneof![0xd7feu16..0xe001, 0x20u16..0x7f, any::<u16>()], 0..12), cut in 0usize..80)
        {
            let escaped: String = units.iter().map(|u| format!("\\u{u:04x}")).collect();
            let json = format!("{{\"a\": \"{escaped}\"}}");
            let value: Value = parse_json(json.as_bytes()).unwrap();
            let want = String::from_utf16_lossy(&units);
            prop_assert_eq!(value["a"].as_str(), Some(want.as_str()));
            let _ = parse_json::<Value>(&json.as_bytes()[..cut.min(json.len())]);
        }
    }
}
