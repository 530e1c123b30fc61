#!/bin/bash
set -e
cd /app
mv amber.txt olive.txt
