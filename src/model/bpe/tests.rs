//! Training of a vocabulary: what becomes a token, and that any text survives.

use super::*;
use crate::model::tokenizer::Tokenizer as ModelTokenizer;

const CORPUS: [&str; 3] = [
    "<|im_start|>user\nWrite the word amber into the file tiger.txt.<|im_end|>\n",
    "<tool_call>\n{\"name\": \"bash\", \"arguments\": {\"command\": \"echo amber > tiger.txt\"}}\n</tool_call>",
    "amber tiger",
];

fn trained() -> ModelTokenizer {
    let folder = tempfile::tempdir().expect("folder");
    let bpe = TrainedBpe::train(CORPUS.iter().flat_map(|text| [*text; 5]), 512).expect("trained");
    bpe.save(&folder.path().join("tokenizer.json")).expect("saved");
    let tokenizer = ModelTokenizer::from_dir(folder.path()).expect("loads");
    assert_eq!(tokenizer.vocab_size(), bpe.vocab_size());
    tokenizer
}

#[test]
fn words_of_the_corpus_are_single_tokens() {
    let tokenizer = trained();
    for text in [
        " amber",
        "amber",
        " tiger",
        ".txt",
        " \"",
        "\"}}\n",
        "command",
        "<tool_call>",
        "<|im_end|>",
    ] {
        let ids = tokenizer.encode_rendered(text).expect("encodes");
        assert_eq!(ids.len(), 1, "{text:?} is {ids:?}");
    }
}

#[test]
fn any_text_survives() {
    let tokenizer = trained();
    for text in [
        "",
        "größe ☃ \u{0} \t\r\n x",
        "<|im_end|>",
        "unseen words 12345",
        "\u{10ffff}",
    ] {
        let ids = tokenizer.encode_text(text).expect("encodes");
        assert_eq!(tokenizer.decode(&ids), text);
    }
}

#[test]
fn only_control_tokens_are_special() {
    let tokenizer = trained();
    for (token, special) in CHAT_TOKENS {
        let id = tokenizer.token_to_id(token).expect(token);
        assert_eq!(tokenizer.is_special(id), special, "{token}");
    }
}

#[test]
fn the_same_corpus_gives_the_same_file() {
    let text = |corpus: &[&str]| {
        let bpe = TrainedBpe::train(corpus.iter().copied(), 400).expect("trained");
        bpe.tokenizer.to_string(false).expect("json")
    };
    assert_eq!(text(&CORPUS), text(&CORPUS));
    assert_ne!(text(&CORPUS), text(&CORPUS[..1]));
}

#[test]
fn a_vocabulary_without_room_is_refused() {
    assert!(matches!(
        TrainedBpe::train(["x"], 264),
        Err(BpeError::VocabularyTooSmall { vocab_size: 264, .. })
    ));
}
