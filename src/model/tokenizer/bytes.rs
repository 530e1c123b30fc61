//! The bytes that each id stands for.
//!
//! Byte-level BPE writes a byte as one printable character: 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF as the
//! character of the same number, the remaining 68 bytes in ascending order as U+0100, U+0101, …

use std::collections::HashMap;
use tokenizers::{AddedToken, Tokenizer};

/// Byte for each character of the byte-level alphabet.
pub(super) fn alphabet() -> HashMap<char, u8> {
    let mut map = HashMap::with_capacity(256);
    let mut next = 0x100;
    for byte in 0..=255u8 {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let c = if printable {
            char::from(byte)
        } else {
            next += 1;
            char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
        };
        map.insert(c, byte);
    }
    map
}

/// Bytes by id, from 0 to the highest id; ids without a token have none.
pub(super) fn table(inner: &Tokenizer, added: &[(u32, AddedToken)]) -> Result<Vec<Box<[u8]>>, String> {
    let alphabet = alphabet();
    let vocab = inner.get_vocab(false);
    let highest = vocab
        .values()
        .copied()
        .chain(added.iter().map(|(id, _)| *id))
        .max()
        .ok_or("the vocabulary is empty")?;
    let mut table = vec![Box::<[u8]>::default(); highest as usize + 1];
    for (token, id) in &vocab {
        let bytes: Option<Box<[u8]>> = token.chars().map(|c| alphabet.get(&c).copied()).collect();
        match bytes {
            Some(bytes) => table[*id as usize] = bytes,
            // Added tokens may also be listed in the vocabulary, under their plain text.
            None if added.iter().any(|(a, _)| a == id) => {}
            None => {
                return Err(format!(
                    "token {id} `{token}` is not written in the byte-level alphabet; only byte-level BPE \
                     tokenizers are supported"
                ))
            }
        }
    }
    // The library leaves out what it cannot encode; text must never lose a byte.
    for (c, byte) in &alphabet {
        if !vocab.contains_key(c.to_string().as_str()) {
            return Err(format!(
                "the byte {byte:#04x} (`{c}`) has no token, so text with it cannot be encoded; a byte-level \
                 vocabulary has all 256"
            ));
        }
    }
    for (id, token) in added {
        table[*id as usize] = token.content.as_bytes().into();
    }
    Ok(table)
}
