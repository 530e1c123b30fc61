//! Ids are those of the library, for hard and for random texts.

use super::super::{testing, Tokenizer};
use super::*;
use proptest::prelude::*;
use std::path::PathBuf;
use std::sync::OnceLock;

struct Pair {
    tokenizer: Tokenizer,
    fast: FastBpe,
}

/// The tokenizer of `LEGORL_TEST_TOKENIZER` (a folder with Qwen3's tokenizer.json), or a small one.
fn pair() -> &'static Pair {
    static PAIR: OnceLock<Pair> = OnceLock::new();
    PAIR.get_or_init(|| {
        let small = tempfile::tempdir().unwrap();
        testing::write_folder(small.path());
        let folder = std::env::var("LEGORL_TEST_TOKENIZER").map_or(small.path().to_owned(), PathBuf::from);
        let json = std::fs::read(folder.join("tokenizer.json")).unwrap();
        Pair {
            tokenizer: Tokenizer::from_dir(&folder).unwrap(),
            fast: FastBpe::load(&json).unwrap(),
        }
    })
}

fn check(text: &str) -> Result<(), TestCaseError> {
    let pair = pair();
    let want = pair.tokenizer.inner.encode_fast(text, false).unwrap();
    // Twice: the second time words come from the cache.
    for _ in 0..2 {
        let mut got = Vec::new();
        pair.fast
            .encode(text, &|text| pair.tokenizer.normalized(text), &mut got)
            .unwrap();
        prop_assert_eq!(got.as_slice(), want.get_ids(), "{:?}", text);
    }
    Ok(())
}

#[test]
fn texts_that_are_known_to_be_hard() {
    for text in [
        "",
        " ",
        "  \n\n  x",
        "a\r\n\r\nb  c   ",
        "it's IT'S it'\u{17f} we'RE they'Ve I'll 'd'm 'x '",
        "don't' 'til",
        "12345 1,234.5 ٣٤٥ Ⅷ ½",
        "e\u{301} \u{301}x A\u{30a} \u{212b} \u{1e9b}\u{323} 각\u{11a8} ﬁ",
        "क्षि ไทย 中文，测试。\u{3099}か\u{3099}",
        "\u{a0}x \u{2003}y\u{85}z\u{2028}w\u{200b}v\u{feff}",
        "👩‍👩‍👧 🏳️‍🌈 \u{1f1e6}\u{1f1e7}",
        "<tool_call>\n{}</tool_call><think>a</think> <tool_cal <|im_end|><|im_end|",
        "\u{fdd0}\u{fdd1}",
        "fn main() { println!(\"{}\", 0x1f); } // --> ==>\t\t\tx",
        "     ...   !!!\n\n\n???",
    ] {
        check(text).unwrap();
    }
    check(&"a".repeat(300)).unwrap();
    check(&"helloworldassistant".repeat(40)).unwrap();
    check(&"=-".repeat(400)).unwrap();
}

#[test]
fn what_is_not_supported_is_named() {
    let small = tempfile::tempdir().unwrap();
    testing::write_folder(small.path());
    let json = std::fs::read_to_string(small.path().join("tokenizer.json")).unwrap();
    let refuse = |from: &str, to: &str| {
        assert!(json.contains(from), "{from}");
        FastBpe::load(json.replace(from, to).as_bytes()).err().unwrap()
    };
    assert!(refuse("\"dropout\":null", "\"dropout\":0.1").contains("dropout"));
    assert!(refuse("{\"type\":\"NFC\"}", "{\"type\":\"NFKC\"}").contains("NFKC"));
    assert!(refuse("Isolated", "Removed").contains("pre-tokenizer"));
    assert!(refuse("|\\\\s+(?!\\\\S)", "").contains("pattern"));
    assert!(refuse("\"normalized\":false", "\"normalized\":true").contains("endoftext"));
}

fn pieces() -> impl Strategy<Value = String> {
    let marks = prop::sample::select(vec![
        "<tool_call>",
        "</tool_call>",
        "<|im_end|>",
        "<|im_start|>",
        "<think>",
        "'s",
        "'RE",
        "\r\n",
        "\n\n",
        "  ",
        " ",
        "\t",
        "\u{a0}",
        "\u{301}",
        "é",
        "123",
        "hello",
        " world",
        "fn ",
        "::",
        "->",
        "_",
        "中",
        "\u{1100}\u{1161}",
        "\u{0f73}",
    ]);
    prop_oneof![
        5 => marks.prop_map(str::to_owned),
        2 => any::<char>().prop_map(String::from),
        2 => "[ -~]{0,6}",
        1 => "\\PC{0,4}",
        1 => "[\\p{L}\\p{M}\\p{N}\\s]{0,5}",
    ]
}

/// Lines of code and prose, white space in runs, and lines that never end.
fn long_texts() -> impl Strategy<Value = String> {
    let code = prop::sample::select(vec![
        "    let mut x: Vec<u32> = Vec::new();\n",
        "\tfor (int i = 0; i < 128; ++i) {\r\n",
        "def f(a, *, b=None) -> dict[str, int]:\n\n",
        "https://example.org/a?b=%20c#d ",
        "Mr. O'Neill's dog didn't bark; it'd've. ",
        "0x7fff_ffff 3.14159e-26 1,000,000\n",
        "日本語の文章と English mixed。",
        "Ünïcödé e\u{301}e\u{301} ",
        "{\"k\":[1,2,{\"a\":null}]}",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "----------------------------------------",
        "                                        ",
        "\n\n\n\n\n\n\n\n",
        "<|im_start|>assistant\n<think>\n",
    ]);
    prop::collection::vec((code, 1usize..12), 1..6).prop_map(|parts| {
        parts
            .into_iter()
            .map(|(text, times)| text.repeat(times))
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("LEGORL_FUZZ_CASES").map_or(3000, |n| n.parse().expect("LEGORL_FUZZ_CASES is a number"))
    ))]
    #[test]
    fn ids_are_those_of_the_library(pieces in prop::collection::vec(pieces(), 0..12)) {
        check(&pieces.concat())?;
    }

    #[test]
    fn ids_of_long_texts_are_those_of_the_library(text in long_texts(), more in pieces(), at in any::<prop::sample::Index>()) {
        check(&text)?;
        let mut at = at.index(text.len());
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        check(&format!("{}{more}{}", &text[..at], &text[at..]))?;
    }
}

/// Every character alone, and between letters and spaces.
#[test]
fn every_character_is_in_the_right_class() {
    let all = (0..0x11_0000u32).filter_map(char::from_u32);
    let step = if std::env::var_os("LEGORL_FUZZ_CASES").is_some() {
        1
    } else {
        37
    };
    for c in all.step_by(step) {
        check(&format!("{c} a{c}b {c}.{c}1{c}\n{c}")).unwrap();
    }
}
